import io

import pytest
from rich.console import Console

from effasr.training.run_dir.progress import ProgressDisplay, SilentDisplay, describe

LINE = {
    "step": 50,
    "loss": 1.23456,
    "step_s": 0.5,
    "audio_seconds": 200.0,
    "padding_frames": 0.004,
    "data_wait_s": 0.01,
}


def test_the_figures_are_those_of_the_line():
    text = describe(LINE, ranks=2)
    assert text == "loss 1.2346  RTFx 200 per rank  padding 0.4 %  data wait 2 %"
    hybrid = describe(LINE | {"transducer": 2.34567}, ranks=2)
    assert hybrid.startswith("loss 1.2346 (transducer 2.3457)  RTFx 200")
    assert describe(LINE | {"transducer": LINE["loss"]}, ranks=2) == text
    assert describe(LINE | {"loss": None}, ranks=1).startswith("loss -  RTFx 400")


def test_without_a_terminal_there_is_one_plain_line_per_entry():
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=40)
    with ProgressDisplay(170, 0, 1, console, validate_every=30) as display:
        display.advance(49)
        display.metrics(LINE)
        display.show("validation: [WER] 0.1")
        display.validation_s = 30.0
        display.metrics(LINE | {"step": 110})
    first, second, third = out.getvalue().splitlines()
    assert first.startswith("step 50/170  loss 1.2346")
    assert first.endswith("ETA 0:01:00")
    assert second == "validation: [WER] 0.1"
    assert third.endswith("ETA 0:01:30")  # 60 steps and two validations


@pytest.mark.parametrize("step", [50, 170])
def test_on_a_terminal_there_is_a_bar(step):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    with ProgressDisplay(total=170, done=40, ranks=1, console=console) as display:
        display.metrics(LINE | {"step": step})
    assert f"{step}/170" in out.getvalue()
    assert "RTFx" in out.getvalue()


def test_the_line_of_progress_fits_80_columns():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with ProgressDisplay(total=2_200, done=0, ranks=1, console=console) as display:
        display.metrics(LINE | {"data_wait_s": 0.05})
    assert "padding 0.4 %  data wait 10 % ETA" in out.getvalue()


def test_other_ranks_say_nothing(capsys):
    with SilentDisplay() as display:
        display.metrics(LINE)
        display.show("hello")
    assert capsys.readouterr() == ("", "")
