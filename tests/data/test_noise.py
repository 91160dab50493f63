import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from lhotse import CutSet, Recording, RecordingSet

from effasr.config import ConfigError, from_mapping
from effasr.data.audio.augmentation import augmenter
from effasr.data.audio.augmentation.augmenter import (
    Augmenter,
    Clips,
    ImpulseResponse,
    add_noise,
    convolve,
    looped,
    mean_power,
    reverberate,
    simulated_room,
    telephone,
)
from effasr.data.audio.augmentation.config import (
    AudioAugmentationConfig,
    NoiseConfig,
    ReverberationConfig,
    TelephoneConfig,
)
from effasr.data.audio.silence import SilencePaddingConfig, with_silence
from effasr.data.audio.waveform import AudioError
from effasr.data.config import DataConfig
from effasr.data.features.frame_geometry import FASTCONFORMER
from effasr.data.index.corpus import Corpus
from effasr.data.loader import Loader, StepBatch
from tests.support.corpora import make_loader, write_lines
from tests.support.corpora import take_steps as take

RATE = 16_000


def white(samples: int, seed: int = 0, loudness: float = 0.1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (loudness * rng.standard_normal(samples)).astype(np.float32)


def tone(hertz: float, samples: int = RATE) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(samples) / RATE)).astype(np.float32)


def decibels(ratio: float) -> float:
    return 10 * math.log10(ratio)


@pytest.mark.parametrize("snr", [-10.0, 0.0, 7.5, 20.0])
def test_noise_has_the_ratio_asked_for(snr: float) -> None:
    speech = white(8000, 1, 0.2) * np.hanning(8000).astype(np.float32)
    noisy = add_noise(speech, white(8000, 2, 3.0), snr)
    assert noisy.dtype == np.float32
    assert decibels(mean_power(speech) / mean_power(noisy - speech)) == pytest.approx(snr, abs=0.1)


def test_silence_has_no_ratio() -> None:
    speech, silence = white(100), np.zeros(100, np.float32)
    assert (add_noise(speech, silence, 5.0) == speech).all()
    assert (add_noise(silence, speech, 5.0) == silence).all()
    assert len(add_noise(silence[:0], silence[:0], 5.0)) == 0
    assert mean_power(silence[:0]) == 0


@given(st.integers(1, 2000), st.integers(0, 5000), st.data())
@settings(deadline=None)
def test_a_short_clip_is_repeated(length: int, wanted: int, data: st.DataObject) -> None:
    clip, start = white(length), data.draw(st.integers(0, length - 1))
    result = looped(clip, wanted, start)
    assert (len(result), result.dtype) == (wanted, np.float32)
    if start + wanted <= length:
        assert (result == clip[start : start + wanted]).all()


def test_where_a_clip_begins_anew_nothing_clicks_and_nothing_fades() -> None:
    ramp = np.linspace(-1, 1, 4000, dtype=np.float32)
    # Repeated without a fade, it would jump by 2.
    assert np.abs(np.diff(looped(ramp, 20_000, 1234))).max() < 0.02
    parts = looped(white(4000), 200_000, 0)[: 3680 * 54].reshape(54, 3680)
    assert mean_power(parts[1:, :320].ravel()) == pytest.approx(0.01, rel=0.25)


@given(st.integers(1, 5000), st.integers(1, 1500))
@settings(max_examples=30, deadline=None)
def test_the_convolution_is_that_of_its_definition(signal: int, kernel: int) -> None:
    item, other = white(signal, 1), white(kernel, 2)
    result = convolve(item, other)
    assert result.dtype == np.float32
    expected = np.convolve(item.astype(np.float64), other.astype(np.float64))
    np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_a_room_keeps_length_loudness_and_time(seed: int) -> None:
    speech = white(RATE, seed) * np.hanning(RATE).astype(np.float32)
    response, same, other = (
        simulated_room(np.random.default_rng(each)) for each in (seed, seed, seed + 1)
    )
    assert np.array_equal(response.values, same.values)
    assert not np.array_equal(response.values[:50], other.values[:50])
    assert (response.values.dtype, response.delay) == (np.float32, 0)
    # As far away as a hall is long: all arrives half a second later.
    late = ImpulseResponse(np.append(np.zeros(8000, np.float32), response.values), 8000)
    # A recording in which the direct sound is the loudest, upside down.
    result = late.values.copy()
    result[8000] *= -5
    for room in (response, late, ImpulseResponse.of(result)):
        received = reverberate(speech, room)
        assert (len(received), received.dtype) == (len(speech), np.float32)
        assert decibels(mean_power(received) / mean_power(speech)) == pytest.approx(0, abs=0.01)
        spectra = np.fft.rfft(received, 2 * RATE) * np.conj(np.fft.rfft(speech, 2 * RATE))
        assert np.abs(np.fft.irfft(spectra)).argmax() == 0


def test_silence_stays_silent_in_a_room() -> None:
    silence = np.zeros(1000, np.float32)
    assert (reverberate(silence, simulated_room(np.random.default_rng(0))) == silence).all()
    with pytest.raises(AudioError, match="the impulse response is silent"):
        ImpulseResponse.of(silence)


def test_the_end_of_a_response_is_cut_off_where_nobody_hears_it() -> None:
    recorded = np.zeros(9000, np.float32)
    recorded[[10, 500, 5000]] = 1.0, 0.1, 1e-5
    response = ImpulseResponse.of(recorded)
    assert (len(response.values), response.delay) == (501, 10)


def test_simulated_rooms_decay_as_they_are_asked_to() -> None:
    """The level falls from -5 to -25 dB in a third of the T60, by Schroeder's integral."""
    for t60 in (0.2, 0.5, 1.0):
        slopes = []
        for seed in range(40):
            response = simulated_room(np.random.default_rng(seed), (t60, t60)).values[1:]
            remaining = np.cumsum(np.square(response, dtype=np.float64)[::-1])[::-1]
            remaining /= remaining[0]
            slopes.append(
                3 * (np.argmax(remaining < 10**-2.5) - np.argmax(remaining < 10**-0.5)) / RATE
            )
        assert np.median(slopes) == pytest.approx(t60, rel=0.05)


def test_a_telephone_has_no_high_tones_and_coarse_steps() -> None:
    low, high = tone(1000), tone(6000)
    assert mean_power(telephone(high)) < 1e-4 * mean_power(high)
    for samples in (1, 2, 3, 101, 1600, 1601, len(low)):
        received = telephone(low[:samples])
        assert (len(received), received.dtype) == (samples, np.float32)
    # 8 bits of mu-law leave about 38 dB; and nothing is shifted in time.
    ratio = mean_power(low[500:-500]) / mean_power((received - low)[500:-500])
    assert 30 < decibels(ratio) < 45
    assert np.abs(telephone(8 * low)).max() < 1.5


@pytest.fixture
def noises(tmp_path: Path) -> Path:
    """A folder of three recordings, one of them in a folder in it."""
    (tmp_path / "noises/deeper").mkdir(parents=True)
    for number, name in enumerate(("a.wav", "b.flac", "deeper/c.wav")):
        soundfile.write(tmp_path / "noises" / name, white(4000 + 3000 * number, number), RATE)
    return tmp_path / "noises"


@pytest.fixture
def rooms(tmp_path: Path) -> Path:
    folder = tmp_path / "rooms"
    folder.mkdir()
    for number in range(2):
        response = white(2000, number) * np.exp(-np.arange(2000) / 300).astype(np.float32)
        response[20] = 0.9
        soundfile.write(folder / f"{number}.wav", response, RATE)
    return folder


def everything(noises: Path, rooms: Path) -> AudioAugmentationConfig:
    return AudioAugmentationConfig(
        reverberation=ReverberationConfig(manifests=str(rooms)),
        noise=NoiseConfig(manifests=(str(noises),), snr=(0, 10)),
        telephone=TelephoneConfig(probability=0.3),
    )


@pytest.fixture
def make(nemo, tokenizer, noises, rooms) -> Callable[..., Loader]:
    """Makes a loader of 24 tones at two speeds, with everything that audio can be changed by."""
    options = {
        "audio_augmentation": everything(noises, rooms),
        "speed_perturbation": (1.0, 1.1),
        "silence_padding": SilencePaddingConfig(seconds=(0.1, 0.6)),
    }
    return partial(make_loader, nemo(24), tokenizer, **options)


def audio(steps: list[StepBatch]) -> Iterator[tuple[str, np.ndarray]]:
    """Every utterance with its samples, in order."""
    for batch in (batch for step in steps for batch in step.batches):
        values, places = batch.audio.values.numpy(), batch.audio.layout.cu_seqlens.tolist()
        for number, name in enumerate(batch.ids):
            yield name, values[places[number] : places[number + 1]]


def assert_same(one: list[StepBatch], other: list[StepBatch]) -> None:
    pairs = list(zip(audio(one), audio(other), strict=True))
    assert pairs
    for (name, left), (same, right) in pairs:
        assert name == same
        assert np.array_equal(left, right)


def test_resumed_runs_and_workers_change_audio_alike(make: Callable[..., Loader]) -> None:
    whole = take(make(), 6)
    assert whole[-1].epoch >= 1
    for workers in (1, 2):
        assert_same(whole, take(make(workers=workers), 6))
    for start in (1, 4):
        at = whole[start - 1].next_position
        assert_same(whole[start:], take(make(workers=1), 6 - start, *at))


def test_epochs_seeds_and_steps_differ_and_lengths_stay(make: Callable[..., Loader]) -> None:
    loader = make()
    steps = take(loader, 2 * loader.plan(0).num_steps)
    epochs = [dict(audio([s for s in steps if s.epoch == epoch])) for epoch in (0, 1)]
    both = epochs[0].keys() & epochs[1].keys()
    clean = dict(audio(take(make(audio_augmentation=AudioAugmentationConfig()), len(steps))))
    same = sum(np.array_equal(epochs[0][name], epochs[1][name]) for name in both)
    # Half of the utterances have noise and half a room: a tenth has nothing, twice in a row.
    assert same < 0.2 * len(both)
    for name in both:
        assert len(epochs[0][name]) == len(epochs[1][name]) == len(clean[name])
    changed = sum(not np.array_equal(epochs[0][name], clean[name]) for name in both)
    assert 0.6 * len(both) < changed < len(both)
    other = dict(audio(take(make(seed=4), 4)))
    assert not all(np.array_equal(other[n], epochs[0][n]) for n in other.keys() & both)


def test_silence_is_planned_and_divided_anew_in_each_epoch(nemo, tokenizer) -> None:
    padding = SilencePaddingConfig(seconds=(0.2, 0.6), probability=0.75)
    make = partial(make_loader, nemo(24), tokenizer)
    plain, loader = make(), make(silence_padding=padding)
    speech = {plain._corpus.name(i): plain._corpus.example(i).audio for i in range(24)}
    corpus = loader._corpus
    silence = np.array([corpus.silence(index) for index in range(24)])
    assert ((silence == 0) | ((silence >= 3200) & (silence <= 9600))).all()
    assert 10 <= np.count_nonzero(silence) <= 23
    assert (corpus.samples == plain._corpus.samples + silence).all()
    assert (corpus.lengths.frames == FASTCONFORMER.frames(corpus.samples)).all()
    assert corpus.durations[1] == round(float(corpus.samples.max()) / RATE, 3)
    places: dict[str, set[int]] = {}
    for name, samples in audio(take(loader, 3 * loader.plan(0).num_steps)):
        index = [corpus.name(i) for i in range(24)].index(name)
        assert len(samples) == corpus.samples[index]
        inside = np.lib.stride_tricks.sliding_window_view(samples, len(speech[name]))
        begin = int(np.flatnonzero((inside[:, :50] == speech[name][:50]).all(1))[0])
        assert np.array_equal(inside[begin], speech[name])
        outside = np.concatenate([samples[:begin], samples[begin + len(speech[name]) :]])
        assert mean_power(outside) < 1e-3 * mean_power(speech[name]) if len(outside) else True
        if silence[index]:
            places.setdefault(name, set()).add(begin)
    assert sum(len(begins) > 1 for begins in places.values()) > 0.7 * len(places)
    assert corpus.fingerprint != plain._corpus.fingerprint


@pytest.mark.parametrize(
    ("limits", "longest"),
    [
        ({"max_duration": 1.15}, 18_400),
        ({"frame_budget": 14}, 17_920),
        ({"max_frames": 14}, 17_920),
    ],
)
def test_no_utterance_is_dropped_for_its_silence(nemo, tokenizer, limits, longest) -> None:
    """Those that are nearly as long as allowed get less of it."""
    options = {"frame_budget": 60} | limits
    most = options.pop("max_frames", None)
    config = DataConfig(train=str(nemo(7)), **options)
    padded = replace(config, silence_padding=SilencePaddingConfig(seconds=5.0, probability=1.0))
    corpora = [Corpus.load(c.train, tokenizer, c, max_frames=most) for c in (config, padded)]
    assert len(corpora[0]) == len(corpora[1])
    assert corpora[0].dropped == corpora[1].dropped
    assert (corpora[1].samples == longest).all()


def test_the_sound_of_silence() -> None:
    speech = white(RATE)
    kinds = []
    for seed in range(100):
        padded, begin = with_silence(speech, 8000, np.random.default_rng(seed))
        assert np.array_equal(padded[begin : begin + RATE], speech)
        silence = np.concatenate([padded[:begin], padded[begin + RATE :]])
        assert len(silence) == 8000
        kinds.append(10 * np.log10(mean_power(silence) + 1e-20))
    # A quarter is digital silence, the others are 30 to 70 dB below the speech, at -20 dB.
    assert 15 < sum(level < -150 for level in kinds) < 35
    assert all(level < -150 or -91 < level < -49 for level in kinds)


def test_recordings_are_read_from_anything(noises: Path, tmp_path: Path) -> None:
    files = sorted(noises.rglob("*.*"))
    recordings = [Recording.from_file(file) for file in files]
    lines = tmp_path / "noise.jsonl"
    write_lines(lines, [{"audio_filepath": str(file)} for file in files])
    RecordingSet.from_recordings(recordings).to_file(tmp_path / "recordings.jsonl.gz")
    CutSet.from_cuts(r.to_cut() for r in recordings).to_file(tmp_path / "cuts.jsonl.gz")
    expected = Clips.load([noises], "noise")
    assert len(expected) == 3
    for name in ("noise.jsonl", "recordings.jsonl.gz", "cuts.jsonl.gz"):
        result = Clips.load([tmp_path / name], "noise")
        assert result.fingerprint == expected.fingerprint
        for index in range(3):
            assert np.array_equal(result.read(index), expected.read(index))
    part = {"audio_filepath": str(files[0]), "offset": 0.05, "duration": 0.08, "text": "-"}
    lines.write_text(json.dumps(part))
    result = Clips.load([lines], "noise")
    assert np.array_equal(result.read(0), expected.read(0)[800:2080])
    assert result.fingerprint != expected.fingerprint


def test_parts_are_those_of_the_whole_and_little_is_kept(
    noises: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Clips.load([noises], "noise")
    monkeypatch.setattr(augmenter, "_WHOLE", 5000)
    long = Clips.load([noises], "noise")
    for index in range(3):
        assert np.array_equal(long.read(index, 100, 2000), whole.read(index)[100:2100])
    monkeypatch.setattr(augmenter, "_WHOLE", 20 * RATE)
    monkeypatch.setattr(augmenter, "_CACHE_BYTES", 50_000)
    few = Clips.load([noises], "noise")
    for index in (0, 1, 2, 0, 2, 1):
        assert np.array_equal(few.read(index), whole.read(index))
        assert sum(array.nbytes for array in few._cache.values()) <= 50_000
    assert 0 < len(few._cache) < 3


@pytest.mark.parametrize("rate", [8000, 44_100])
def test_the_last_part_of_a_clip_of_any_rate_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: int
) -> None:
    monkeypatch.setattr(augmenter, "_WHOLE", 100)
    for extra in range(24):
        soundfile.write(tmp_path / f"{extra:02}.wav", white(rate // 4 + extra), rate)
    result = Clips.load([tmp_path], "noise")
    for index, length in enumerate(result.samples.tolist()):
        for start in (0, 1, 7, length - 500, length - 50):
            assert len(result.read(index, start, length - start)) == length - start


def test_a_run_tells_what_is_done(make: Callable[..., Loader]) -> None:
    assert make().augmentation == (
        "50 % in 2 recorded rooms, 50 % with noise at 0 to 10 dB from 3 recordings, "
        "30 % over the telephone"
    )
    assert make(audio_augmentation=AudioAugmentationConfig()).augmentation == ""


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_noise_follows_on_bad_audio(
    make: Callable[..., Loader], noises: Path, workers: int
) -> None:
    loader, skipping = make(workers=workers), make(workers=workers, on_bad_audio="skip")
    clean = make(audio_augmentation=AudioAugmentationConfig())
    for file in noises.rglob("*.*"):
        file.write_bytes(b"no audio")
    with pytest.raises(
        AudioError, match=r"`data\.audio_augmentation`: .*noises/.* Mend it or remove it, or set"
    ):
        take(loader, 3)
    steps = take(skipping, 3)
    drops = [drop for step in steps for drop in step.skipped]
    assert {drop.id for drop in drops} <= {"a", "b", "c"}
    assert len(drops) > 3
    # The utterances themselves are all there.
    names = [name for name, _ in audio(steps)]
    assert names == [name for name, _ in audio(take(clean, 3))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "nowhere",
            r"`data\.audio_augmentation\.noise\.manifests`: .*nowhere: there is no such file",
        ),
        ("empty", r"`data\.audio_augmentation\.noise\.manifests`: .*empty holds no audio"),
        ({"audio_filepath": "gone.wav"}, r"gone\.wav: there is no such file"),
        ({"audio_filepath": "broken.wav"}, r"audio_augmentation\.noise\.manifests`: .*broken\.wav"),
        (
            {"audio_filepath": "noises/a.wav", "offset": 3, "duration": 1},
            r"`offset` is 3 s, but the file ends at 0\.25 s",
        ),
        (
            {"id": "a", "start": 0, "duration": 1, "channel": 0, "type": "MonoCut"},
            r"m\.jsonl:1: cut 'a' has no recording",
        ),
        ({"something": 1}, r"m\.jsonl:1: neither a line with `audio_filepath`"),
    ],
)
@pytest.mark.usefixtures("noises")
def test_recordings_are_checked_at_the_start(tmp_path: Path, line: object, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.wav").write_bytes(b"no audio")
    (tmp_path / "m.jsonl").write_text(json.dumps(line))
    path = tmp_path / (line if isinstance(line, str) else "m.jsonl")
    config = AudioAugmentationConfig(noise=NoiseConfig(manifests=str(path)))
    with pytest.raises(ValueError, match=message):
        Augmenter(config, seed=0, skip_unreadable=True)


def test_the_plan_is_known_again_by_the_recordings(
    make: Callable[..., Loader], noises: Path
) -> None:
    before = make().fingerprint(0)
    assert make().fingerprint(0) == before
    assert make(audio_augmentation=AudioAugmentationConfig()).fingerprint(0) != before
    (noises / "a.wav").unlink()
    assert make().fingerprint(0) != before


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"noise": {}}, r"a\.noise: `manifests` must name at least one folder"),
        ({"noise": {"manifests": "x", "probability": 0}}, "`probability` must be greater than 0"),
        ({"noise": {"manifests": "x", "probability": 1.5}}, "at most 1, but is 1.5: leave `noise`"),
        ({"noise": {"manifests": "x", "snr": [9, 3]}}, r"`snr` must be .*, but is \[9, 3\]"),
        ({"reverberation": {}}, "either `manifests` or `simulated: true` .* neither is"),
        ({"reverberation": {"manifests": "x", "simulated": True}}, "but both are"),
        ({"reverberation": {"simulated": True, "decay_time": [0.05, 1]}}, r"but is \[0\.05, 1\]"),
        ({"telephone": {"probability": 0}}, "leave `telephone` null"),
        ({"seconds": 0}, "`seconds` must be a number greater than 0.* but is 0.0"),
        ({"seconds": [1, 0.5]}, r"but is \[1.0, 0.5\]: \[0.2, 1.5\] is usual"),
        ({"seconds": [1, 60]}, "up to 30"),
        ({"probability": 0}, "leave `silence_padding` null"),
    ],
)
def test_the_configuration_is_checked(mapping: dict, message: str) -> None:
    is_silence = mapping.keys() <= {"seconds", "probability"}
    with pytest.raises(ConfigError, match=message):
        from_mapping(SilencePaddingConfig if is_silence else AudioAugmentationConfig, mapping, "a")


def test_a_file_name_of_noise_need_not_be_utf8(tmp_path: Path) -> None:
    with (tmp_path / os.fsdecode(b"caf\xe9.wav")).open("wb") as file:
        soundfile.write(file, np.full(1600, 0.5, np.float32), 16_000, format="WAV")
    assert Clips.load([tmp_path], "noise").read(0) == pytest.approx(0.5, abs=1e-4)
