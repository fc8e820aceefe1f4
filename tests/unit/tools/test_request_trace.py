"""The recorder behind tools/request_path.py: which modules count as having run."""

from __future__ import annotations

import sys
from types import ModuleType

from tools.request_trace import Recorder


def _module(name: str, source: str, file: str = "<made up>") -> ModuleType:
    module = ModuleType(name)
    exec(compile(source, file, "exec"), module.__dict__)
    return module


def _record(recorder: Recorder, *calls: object) -> dict[str, int]:
    before = sys.getprofile()
    sys.setprofile(recorder)
    try:
        for call in calls:
            call()  # type: ignore[operator]
    finally:
        sys.setprofile(before)
    return recorder.modules()


def test_functions_of_the_package_are_counted_once_while_recording() -> None:
    ours = _module("tokenmill.made_up", "def f(): pass\ndef g(): f()")
    other = _module("elsewhere", "def f(): pass")
    recorder = Recorder()
    assert _record(recorder, ours.f) == {}
    recorder.recording = True
    assert _record(recorder, ours.g, ours.f, other.f) == {"tokenmill.made_up": 2}


def test_below_the_forward_pass_everything_counts() -> None:
    """Executors record that pass at start-up, before any request."""
    layer = _module("tokenmill.model.layer", "def apply(): pass")
    decoder = _module(
        "tokenmill.model.decoder", "def forward(): apply()", "/x/tokenmill/model/architectures/decoder.py"
    )
    decoder.__dict__["apply"] = layer.apply
    recorder = Recorder()
    assert _record(recorder, layer.apply) == {}
    assert _record(recorder, decoder.forward) == {"tokenmill.model.decoder": 1, "tokenmill.model.layer": 1}
    assert _record(recorder, _module("tokenmill.after", "def f(): pass").f) == {
        "tokenmill.model.decoder": 1,
        "tokenmill.model.layer": 1,
    }
