"""An exchange in our own CUDA stream, by a model of streams."""

import contextlib

import pytest
import torch

from dgc.collective import Collective
from dgc.transport import Wait, run


def test_whoever_catches_an_error_waits_for_what_was_put_back(monkeypatch):
    """On a GPU, where the exchange runs in a stream of its own."""

    class Stream(list):
        def wait_stream(self, other):
            self.append(other)

    def fails(wait=False):
        raise FloatingPointError

    def path():
        yield Collective("all_reduce", torch.zeros(1))

    def exchange():
        transport = type("Nowhere", (), {"start": lambda self, collective, name: Wait(fails)})()
        return run.PathRun(path(), transport, "x", lambda collective: None, device)

    main, own, device = Stream(), Stream(), torch.device("cuda", 0)
    monkeypatch.setattr(run, "_stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    under_way, other = exchange(), exchange()
    assert own == [main, main] and main == []
    with pytest.raises(FloatingPointError):
        exchange().finish()
    assert len(main) == 1 and main[0] is own
    under_way.abort(wait=False)
    assert len(main) == 2
    with pytest.raises(FloatingPointError):
        other.abort(wait=True)
    assert len(main) == 3
    branch = Stream()
    branch.device = device
    run.join_streams([branch])
    assert main[-1] is branch
    with run.own_stream(device):
        assert own[-1] is main
