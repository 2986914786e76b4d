"""A real single-node Kubernetes for the demo and the tests.

`python tests/cluster/cluster.py build|images|up|down|status|kubeconfig [demo|test|scratch|gpu]`
"""

from __future__ import annotations

import argparse
import sys
import time

from localcluster import image_build, lifecycle
from localcluster.binaries import require_tool
from localcluster.record import Record
from localcluster.settings import CLUSTERS, ClusterError, Layout


def _progress(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


def _status(layout: Layout) -> int:
    record = Record.load(layout)
    if record is None:
        print("no local cluster is running")
        return 1
    for name, process in record.processes.items():
        print(f"{name:24} {'running' if process.alive else 'ENDED':8} pid {process.pid}")
    print(f"kubeconfig {layout.admin_kubeconfig}\nlogs       {layout.logs}")
    return 0 if record.healthy else 1


def _build() -> None:
    """Prepare all that `up` needs, where the cluster can run at all: tests skip it with the same words elsewhere.

    And the tools of tests without a cluster, so that no test's time is that of a build.
    """
    if obstacles := lifecycle.obstacles():
        _progress("the local cluster cannot run here: " + "; ".join(obstacles))
    else:
        lifecycle.prepare(_progress)
    for name in ("helm", "promtool", "gitops"):
        try:
            require_tool(name, _progress)
        except ClusterError as error:
            _progress(f"tests that need {name} are skipped: {error}")


def _images() -> None:
    """What the tests of the chart need beside the cluster: Helm, the images, promtool, in the order of their need."""
    require_tool("helm", _progress)
    image_build.build(_progress)
    require_tool("promtool", _progress)


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster.py", description=__doc__)
    parser.add_argument("command", choices=["build", "images", "up", "down", "status", "kubeconfig"])
    parser.add_argument("name", choices=CLUSTERS, nargs="?", default="demo", help="default: demo")
    arguments = parser.parse_args()
    command, layout = arguments.command, Layout(arguments.name)
    try:
        if command == "status":
            return _status(layout)
        if command == "kubeconfig":
            print(layout.admin_kubeconfig)
        elif command == "build":
            _build()
        elif command == "images":
            _images()
        elif command == "up":
            started = time.monotonic()
            lifecycle.up(layout, _progress)
            _progress(f"the node is Ready after {time.monotonic() - started:.1f} s")
            print(f"export KUBECONFIG={layout.admin_kubeconfig}")
        else:
            _progress("cluster removed" if lifecycle.down(layout) else "there is no local cluster")
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
