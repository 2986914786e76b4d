"""POST /v1/responses: the stateless part of OpenAI's Responses API, by the path of chat completions."""
