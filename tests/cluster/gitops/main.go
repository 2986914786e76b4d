// Command gitops judges objects as GitOps tools do: as Flux, by kstatus of its own fork, and as Argo CD, by a health
// check in Lua, in the interpreter that Argo CD has and with the libraries that it opens.
//
// usage: gitops HEALTH.lua < OBJECTS.json; OBJECTS is an array, and so is the answer on standard output.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	luajson "layeh.com/gopher-json"
)

type verdict struct {
	Status  string `json:"status"`
	Message string `json:"message"`
}

type judged struct {
	Argo    verdict `json:"argo"`
	Kstatus verdict `json:"kstatus"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 2 {
		return fmt.Errorf("usage: gitops HEALTH.lua < OBJECTS.json")
	}
	script, err := os.ReadFile(os.Args[1])
	if err != nil {
		return err
	}
	var objects []map[string]any
	if err := json.NewDecoder(os.Stdin).Decode(&objects); err != nil {
		return err
	}
	found := make([]judged, 0, len(objects))
	for _, object := range objects {
		argo, err := health(string(script), object)
		if err != nil {
			return fmt.Errorf("health check of %v: %w", object["metadata"], err)
		}
		flux, err := kstatus(object)
		if err != nil {
			return fmt.Errorf("kstatus of %v: %w", object["metadata"], err)
		}
		found = append(found, judged{Argo: argo, Kstatus: flux})
	}
	return json.NewEncoder(os.Stdout).Encode(found)
}

// Argo CD runs a check without io and os of the operating system, with the object as the global obj.
func health(script string, object map[string]any) (verdict, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	libraries := []struct {
		name string
		open lua.LGFunction
	}{
		{lua.LoadLibName, lua.OpenPackage}, // has to be the first
		{lua.BaseLibName, lua.OpenBase},
		{lua.TabLibName, lua.OpenTable},
		{lua.StringLibName, lua.OpenString},
		{lua.MathLibName, lua.OpenMath},
	}
	for _, each := range libraries {
		call := lua.P{Fn: state.NewFunction(each.open), Protect: true}
		if err := state.CallByParam(call, lua.LString(each.name)); err != nil {
			return verdict{}, err
		}
	}
	state.SetGlobal("obj", luajson.DecodeValue(state, object))
	if err := state.DoString(script); err != nil {
		return verdict{}, err
	}
	encoded, err := luajson.Encode(state.Get(-1))
	if err != nil {
		return verdict{}, err
	}
	var answer verdict
	return answer, json.Unmarshal(encoded, &answer)
}

func kstatus(object map[string]any) (verdict, error) {
	body, err := json.Marshal(object) // so that whole numbers are int64, as from an API server
	if err != nil {
		return verdict{}, err
	}
	read := &unstructured.Unstructured{}
	if err := read.UnmarshalJSON(body); err != nil {
		return verdict{}, err
	}
	found, err := status.Compute(read)
	if err != nil {
		return verdict{}, err
	}
	return verdict{Status: found.Status.String(), Message: found.Message}, nil
}
