import numpy as np
import pytest
import soundfile
from lhotse import CutSet, MonoCut, Recording

from effasr.data.audio.waveform import AudioError, load_audio
from effasr.data.manifest.prepare import prepare
from effasr.data.manifest.reader import read
from tests.support.sources import make_source


@pytest.fixture
def shar(tmp_path, nemo):
    """Seven utterances in shards of three."""
    return make_source("shar", nemo(7), tmp_path / "shar")


def test_each_channel_of_a_call_is_a_file_of_its_own(tmp_path, nemo):
    levels = np.float32([0.25, -0.5])
    soundfile.write(
        tmp_path / "call.wav", levels * (1 + 0.2 * np.sin(np.arange(8000)[:, None] / 9)), 16_000
    )
    call = Recording.from_file(tmp_path / "call.wav")
    spoken = read(nemo(2))
    cuts = [
        MonoCut(cut.id, 0.0, 0.5, side, cut.supervisions, recording=call)
        for side, cut in enumerate(spoken)
    ]
    (tmp_path / "shar").mkdir()
    CutSet.from_cuts(cuts).to_shar(str(tmp_path / "shar"), fields={"recording": "flac"})
    result = read(tmp_path / "shar")
    assert [float(load_audio(cut).mean()) for cut in result] == pytest.approx(levels, abs=1e-3)
    assert prepare(tmp_path / "shar", tmp_path / "prepared").kept.utterances == 2


def test_audio_that_is_gone_is_named(shar):
    result = read(shar)
    tar = shar / "recording.000001.tar"
    tar.write_bytes(tar.read_bytes()[:2000])
    with pytest.raises(AudioError, match=r"recording\.000001\.tar\[\d+:\d+\]: the tar file ends"):
        load_audio(result[4])
    tar.unlink()
    with pytest.raises(AudioError, match="No such file") as caught:
        load_audio(result[4])
    assert caught.value.problem == "missing_audio"


def test_shards_that_do_not_fit_together(shar):
    path = shar / "recording.000001.tar"
    for content, message in (
        (bytes(10_240), r"cuts\.000001\.jsonl\.gz:1: .* has no recording of cut"),
        (b"no tar file" * 100, r"recording\.000001\.tar: the audio of .* cannot be read"),
        (None, r"recording\.000001\.tar: .* No such file"),
    ):
        path.write_bytes(content) if content else path.unlink()
        with pytest.raises(ValueError, match=message):
            read(shar)
