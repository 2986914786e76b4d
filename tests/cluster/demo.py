"""The demo: a real Kubernetes, the operator, a small Gemma 4, its plan, and a conversation whose answers are checked.

`python tests/cluster/demo.py up` runs it and may be repeated; `down` removes everything that `up` made.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import openai

from demo_conversation import REQUEST_TIMEOUT_S, WrongAnswer, converse, speak_in_styles
from localcluster import lifecycle, operator_process, target, weights_volume
from localcluster.checkpoint_upload import upload_checkpoint
from localcluster.crds import install_crds
from localcluster.deployment import ADAPTED_EXAMPLE, ADAPTERS, CHECKPOINT, Deployed, adapted_example
from localcluster.plan_text import describe_plan
from localcluster.service_access import service_url
from localcluster.settings import REPOSITORY, ClusterError, Layout
from localcluster.target import Target

LAYOUT = Layout("demo")
NAMESPACE = "modelserve-demo"


def _step(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def _print_conditions() -> Callable[[dict[str, Any]], None]:
    """A callback that prints every condition as it changes."""
    shown: dict[str, tuple[str, str]] = {}

    def seen(resource: dict[str, Any]) -> None:
        for entry in (resource.get("status") or {}).get("conditions") or ():
            now = (entry["status"], entry["reason"])
            if shown.get(entry["type"]) != now:
                shown[entry["type"]] = now
                _step(f"  {entry['type']:18} {entry['status']:8} {entry['reason']:24} {entry['message']}")

    return seen


def _converse(served: Deployed, adapters: list[str]) -> None:
    with service_url(served.target, NAMESPACE, served.name) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S)
        model = client.models.list().data[0].id
        _step(f"talking to {model!r} at {url}/v1, temperature 0; each answer is compared with the right one")
        converse(client, model, lambda line: print(line, flush=True))
        speak_in_styles(client, model, adapters, lambda line: print(line, flush=True))
        print()


def _next_steps(cluster: Target, name: str) -> str:
    path = cluster.kubectl.kubeconfig
    return f"""Try next:
  export KUBECONFIG={path}
  export PATH={cluster.kubectl.program.parent}:$PATH
  kubectl config set-context --current --namespace={NAMESPACE}
  kubectl get ms,ma -o wide
  kubectl describe ms {name}
  kubectl explain modelserve.spec
  kubectl edit ms {name}            # change context.maxModelLen: a new revision takes over without a gap
  kubectl scale ms {name} --replicas=2
  tail -f {LAYOUT.operator_log}
  make demo-down                   # removes all of it"""


def up() -> None:
    cluster = target.find(LAYOUT, _step)
    _step("applying the CRD")
    install_crds(cluster.kubectl)
    _step("starting the operator")
    operator_process.start(cluster)
    _step(f"copying {CHECKPOINT.relative_to(REPOSITORY)} and its adapters onto the volume of namespace {NAMESPACE}")
    weights_volume.create_namespace(cluster, NAMESPACE)
    documents = adapted_example()
    model_serve, *adapters = (each["metadata"]["name"] for each in documents)
    kubectl = cluster.kubectl.within(NAMESPACE)
    copied = [upload_checkpoint(cluster, NAMESPACE, each) for each in (CHECKPOINT, ADAPTERS)]
    if any(copied):
        # A worker that runs since an earlier demo has read what lay there before.
        kubectl.delete("modelserve", model_serve)
    _step(f"kubectl apply -n {NAMESPACE} -f {ADAPTED_EXAMPLE.relative_to(REPOSITORY)}")
    kubectl.apply(*documents)
    served = Deployed(cluster, kubectl, model_serve)
    served.wait_ready(seen=_print_conditions())
    print(f"\n{describe_plan(served.status()['plan'])}\n")
    kubectl.run("wait", "--for=condition=Ready", "modeladapters", *adapters, "--timeout=300s", timeout_s=310)
    print(f"{kubectl.run('get', 'modeladapters')}\n", end="")
    _converse(served, adapters)
    print(_next_steps(cluster, served.name))


def down() -> None:
    stopped = operator_process.stop(LAYOUT)
    if target.user_kubeconfig() is None:
        removed = lifecycle.down(LAYOUT)
        _step("the operator and the cluster are gone" if stopped or removed else "nothing of the demo is running")
        return
    cluster = target.find(LAYOUT, _step)
    weights_volume.delete_namespace(cluster, NAMESPACE)
    _step(f"the operator and namespace {NAMESPACE} are gone; the CRD stays, for it may hold other ModelServes")


def _diagnose() -> str:
    lines = [f"operator's log: {LAYOUT.operator_log}"]
    if target.user_kubeconfig() is None:
        lines.append(f"cluster's logs: {LAYOUT.logs}")
    lines.append(f"pods:           kubectl get pods,events -n {NAMESPACE}")
    lines.append("start over:     make demo-down demo")
    return "\n".join(f"  {line}" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo.py", description=__doc__)
    parser.add_argument("command", choices=["up", "down"])
    command = parser.parse_args().command
    try:
        up() if command == "up" else down()
    except (ClusterError, WrongAnswer, openai.OpenAIError) as error:
        print(f"\nerror: {error}\n{_diagnose()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; make demo-down removes what was started", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
