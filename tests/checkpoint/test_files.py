"""Files: whole or not at all, checked, never executed, and attacked."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from launch import end
from shelves import SOAK, in_lockstep, load, made

import dgc
from dgc.checkpoint import files


def test_there_is_no_checkpoint(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"must be a checkpoint, got a folder without manifest\.json"
    ):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere must be a checkpoint, got no such folder"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("size", [1, 2])
def test_a_new_checkpoint_while_one_is_loaded(tmp_path, size, monkeypatch):
    """Its files are gone when they are to be read; what is new is loaded then. A file that is gone stays an error."""

    def save(epoch):
        return in_lockstep(lambda: dgc.save_checkpoint(tmp_path, *made(), {"epoch": epoch}), 2)

    def read(*arguments):
        if begun:
            thread = threading.Thread(target=save, args=(begun.pop(),))
            thread.start()
            thread.join()
        return original(*arguments)

    save(1)
    begun, original = [2], files.read
    monkeypatch.setattr(files, "read", read)
    assert (
        in_lockstep(lambda: dgc.load_checkpoint(tmp_path, *made()), size) == [{"epoch": 2}] * size
    )
    next(tmp_path.glob("common-*")).unlink()
    with pytest.raises(FileNotFoundError, match=r"common-\S+ is gone"):
        in_lockstep(lambda: dgc.load_checkpoint(tmp_path, *made()), size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda files: files["common"].unlink(),
            r"common-\S+ is gone, which belongs to the checkpoint",
        ),
        (
            lambda files: files["rank-1"].write_bytes(b""),
            r"rank-1-\S+: it must have \d+ bytes, got 0",
        ),
        (
            lambda files: files["rank-1"].write_bytes(files["rank-0"].read_bytes()),
            r"rank-1-\S+: its SHA-256 must be \w+, got",
        ),
        (lambda files: files["manifest"].write_bytes(b"\x00"), r"manifest\.json: "),
        (
            lambda files: files["manifest"].write_text("{}"),
            r"manifest\.json: it must be the manifest of a dgc checkpoint",
        ),
        (lambda files: edited(files, version=0), r"manifest\.json: its version must be 1, got 0"),
        (lambda files: edited(files, average=False), r"manifest\.json: its checksum is wrong"),
        (lambda files: edited(files, size=1), r"manifest\.json: its checksum is wrong"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    in_lockstep(lambda: dgc.save_checkpoint(tmp_path, *made()), 2)
    files = {
        "manifest": tmp_path / "manifest.json",
        **{name: next(tmp_path.glob(f"{name}-*")) for name in ("common", "rank-0", "rank-1")},
    }
    damage(files)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(tmp_path)


def edited(files, **changed):
    files["manifest"].write_text(
        json.dumps({**json.loads(files["manifest"].read_text()), **changed})
    )


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["DGC_BOMB"],)


def test_nothing_in_a_file_is_executed(tmp_path, monkeypatch):
    """A pickle that would make a folder, with all checksums right."""
    from attack import seal

    monkeypatch.setenv("DGC_BOMB", str(tmp_path / "exploded"))
    in_lockstep(lambda: dgc.save_checkpoint(tmp_path / "a", *made()), 2)
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    contents = {
        name: next((tmp_path / "a").glob(f"{name}-*")).read_bytes() for name in manifest["files"]
    }
    for legacy in (False, True):
        torch.save(
            {"version": 1, "name": "common", "model": Bomb()},
            tmp_path / "bomb",
            _use_new_zipfile_serialization=not legacy,
        )
        seal(tmp_path / "a", manifest, {**contents, "common": (tmp_path / "bomb").read_bytes()})
        message = r"common-\S+: " + (
            "it must be a zip archive" if legacy else "Weights only load failed"
        )
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "a")
        assert not (tmp_path / "exploded").exists()


def attack(tmp_path, *arguments, limit):
    """In a process of its own, whose crash would be told."""
    command = [sys.executable, str(Path(__file__).parent / "attack.py"), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    print(ended.stdout)
    return json.loads(ended.stdout)


@pytest.mark.timeout(40_000 if SOAK else 500)
@pytest.mark.parametrize(
    "places", [2_000] if SOAK else [16, pytest.param(50, marks=pytest.mark.long)]
)
def test_killed_while_it_saves(tmp_path, places):
    """By SIGKILL at many lines of the saving: the last checkpoint loads, and it is whole, either the old or the new."""
    outcomes = attack(tmp_path, "kill", places, tmp_path, limit=36_000 if SOAK else 200)
    assert outcomes["old"] > places / 3 and outcomes["new"] > places / 50 and outcomes["files"] == 4


@pytest.mark.timeout(40_000 if SOAK else 500)
@pytest.mark.parametrize(
    "count", [100_000] if SOAK else [140, pytest.param(350, marks=pytest.mark.long)]
)
def test_damaged_files_give_an_error_or_the_right_value(tmp_path, count):
    """Bytes, records and leaves changed, also with all checksums made anew: never a crash, and nothing half loaded."""
    outcomes = attack(tmp_path, "mutate", count, tmp_path, 0, limit=36_000 if SOAK else 200)
    kinds = {
        kind: sum(
            outcomes.get(f"{kind}: {outcome}", 0) for outcome in ("error", "right", "another value")
        )
        for kind in ("file", "manifest", "sealed file", "record", "leaf")
    }
    assert sum(kinds.values()) == count and min(kinds.values()) >= count // 7
    assert (
        outcomes["file: error"] > 0.99 * kinds["file"]
        and outcomes["record: error"] > kinds["record"] / 2
    )


@pytest.mark.long
def test_a_job_that_is_restarted_goes_on_from_the_last_checkpoint(tmp_path):
    """torchrun --max-restarts: a worker is killed between the phases of an exchange; nothing is lost, to the bit."""
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                "--max-restarts",
                "1",
                str(Path(__file__).parent / "restart_job.py"),
                str(tmp_path),
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            status = process.wait(200)
        finally:
            end(process.pid)
    assert status == 0, log.read_text()
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)] == [(1, 4, True)] * 2
