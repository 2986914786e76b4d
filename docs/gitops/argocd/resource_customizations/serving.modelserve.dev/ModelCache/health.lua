-- Health of a ModelCache: what its conditions say of this generation of the spec.
local hs = {}

if obj.status == nil or obj.status.observedGeneration ~= obj.metadata.generation then
  hs.status = "Progressing"
  hs.message = "The operator has not looked at this generation of the spec yet."
  return hs
end

local found = {}
for _, condition in ipairs(obj.status.conditions or {}) do
  found[condition.type] = condition
end

local function say(status, condition)
  hs.status = status
  hs.message = condition.reason .. ": " .. condition.message
  return hs
end

-- Nothing more happens until somebody changes something, or a try is due. What was there before may be read meanwhile.
if found.Stalled ~= nil and found.Stalled.status == "True" then
  return say("Degraded", found.Stalled)
end
if found.Ready ~= nil and found.Ready.status == "True" then
  return say("Healthy", found.Ready)
end
if found.Ready ~= nil then
  return say("Progressing", found.Ready)
end
hs.status = "Progressing"
hs.message = "The operator has not said whether it is ready."
return hs
