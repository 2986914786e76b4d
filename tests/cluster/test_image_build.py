"""Where the images are not built, and that a build which is broken off ends as a whole."""

from __future__ import annotations

import subprocess
from pathlib import Path

from localcluster import image_build, image_job
from localcluster.kubectl import wait_for
from localcluster.processes import Process


def test_a_disk_without_room_is_said_with_what_is_needed_and_what_is_free(tmp_path: Path) -> None:
    free = 7 * 10**9
    needed = f"{tmp_path} while they are built and tested"
    assert image_build.too_little(tmp_path, free) == f"the images need 20 GB at {needed}; 7.0 GB are free"

    archive = image_build.archive("worker", tmp_path)
    archive.parent.mkdir()
    with archive.open("wb") as file:
        file.truncate(13 * 10**9)  # a hole: it takes no room
    assert image_build.too_little(tmp_path, free) == "", "an archive that is there need not be written"


def test_a_build_that_is_stopped_ends_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! > {pids}.new; mv {pids}.new {pids}; wait"
    job = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    wait_for("its child", pids.exists)
    child = Process.of(int(pids.read_text()))
    assert child.alive
    image_job.stop(job)
    assert job.returncode is not None
    assert child.ended_within(60)
