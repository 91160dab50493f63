import json
import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import soundfile
import soxr
import torch

from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.decoding.continuous_batching.engine import Engine
from effasr.decoding.decode import decode
from effasr.decoding.decoded import Decoded, Score
from effasr.model.asr import ASRModel
from effasr.nn.cache.contiguous import GROUP
from effasr.nn.cache.decoder_state import DecoderState
from effasr.nn.feed_forward import FeedForward
from effasr.training.run_dir.run_directory import read_lines
from effasr.transcription import recognizer
from effasr.transcription.recognizer import Recognizer, Request, repeats
from effasr.transcription.results import Alternative, Failure, Transcription, joined
from effasr.transcription.transcribe import Waveform, render, transcribe
from effasr_kernels.attention import reference
from tests.support.recognition import write_set

RATE = 16_000
SECONDS = (0.3, 5.1, 0.7, 3.3, 1.2, 2.6, 0.9, 4.0)


@pytest.fixture(scope="module")
def waveforms(noise) -> list[Waveform]:
    return [Waveform(f"w{n}", noise(s, seed=n), RATE) for n, s in enumerate(SECONDS)]


def _write(path, samples, rate: int = RATE):
    soundfile.write(path, samples, rate, subtype="FLOAT")
    return path


def _texts(model, tokenizer, sources, **options) -> list[str]:
    results = list(transcribe(model, tokenizer, sources, config=DecodingConfig(**options)))
    assert all(isinstance(result, Transcription) for result in results), results
    return [result.text for result in results]


def test_results_come_in_order_however_they_are_batched(model, tokenizer, waveforms) -> None:
    results = list(transcribe(model, tokenizer, waveforms))
    assert [result.id for result in results] == [waveform.id for waveform in waveforms]
    assert [result.duration for result in results] == pytest.approx(SECONDS, abs=1e-3)
    texts = [result.text for result in results]
    assert len(set(texts)) > 5, "the test needs different texts"
    for options in ({"frame_budget": 1}, {"frame_budget": 70}, {"max_sequences": 3}):
        assert _texts(model, tokenizer, waveforms, **options) == texts
    assert _texts(model, tokenizer, waveforms[::-1]) == texts[::-1]


def test_the_attention_of_the_encoder_by_choice(model, tokenizer, waveforms, monkeypatch) -> None:
    calls, run = [], reference.run
    monkeypatch.setattr(reference, "run", lambda a: calls.append(a) or run(a))
    _texts(model, tokenizer, waveforms[:1], attention="reference")
    # One call tries it.
    assert len(calls) > 1
    # What an environment lacks differs.
    message = (
        r"`attention` must be a backend that serves the encoder, but is varlen \(.+\): leave it"
    )
    with pytest.raises(ValueError, match=message):
        Recognizer(model, tokenizer, DecodingConfig(attention="varlen"))


def test_results_come_before_all_sources_are_read(model, tokenizer, waveforms) -> None:
    read = []

    def sources():
        for n in range(200):
            read.append(n)
            yield waveforms[0]

    config = DecodingConfig(frame_budget=4, workers=2)
    results = iter(transcribe(model, tokenizer, sources(), config=config))
    next(results)
    assert len(read) < 20
    results.close()


def test_any_rate_and_any_number_of_channels(model, tokenizer, noise, tmp_path) -> None:
    samples = noise(1.3)
    both = np.stack([samples * 0.5, samples * 1.5], axis=1)
    slow = soxr.resample(both, RATE, 8_000)
    fast = soxr.resample(both, RATE, 44_100)
    results = list(
        transcribe(
            model,
            tokenizer,
            [
                Waveform("mono", samples, RATE),
                Waveform("stereo", both, RATE),
                _write(tmp_path / "stereo.wav", both),
                Waveform("slow", slow, 8_000),
                _write(tmp_path / "slow.wav", slow, 8_000),
                _write(tmp_path / "fast.wav", fast, 44_100),
            ],
        )
    )
    texts = [result.text for result in results if isinstance(result, Transcription)]
    assert len(texts) == 6
    assert texts[0] == texts[1] == texts[2]
    assert texts[3] == texts[4]
    assert [result.duration for result in results] == pytest.approx([1.3] * 6, abs=1e-3)


def test_long_recordings_are_cut_and_joined(model, tokenizer, noise, all_is_speech) -> None:
    samples = noise(11.0, seed=3)
    options = {"chunk_seconds": 3.0, "search_seconds": 0.5}
    config = DecodingConfig(**options)
    (result,) = transcribe(model, tokenizer, [Waveform("long", samples, RATE)], config=config)
    segments = result.segments
    assert len(segments) >= 4
    assert (segments[0].start, segments[-1].end) == pytest.approx((0.0, result.duration), abs=0.7)
    for before, after in pairwise(segments):
        assert before.end <= after.start
    pieces = [
        Waveform("piece", samples[round(s.start * RATE) : round(s.end * RATE)], RATE)
        for s in segments
    ]
    all_is_speech()
    assert [s.text for s in segments] == _texts(model, tokenizer, pieces, **options)
    assert result.text == " ".join(s.text for s in segments if s.text)
    assert len(result.text.split()) > 3


def test_chunks_are_joined_as_the_language_is_written(model, tokenizer, noise) -> None:
    config = DecodingConfig(chunk_seconds=2.0, search_seconds=0.5, method="ctc")
    source = [Waveform("long", noise(7.0, seed=3), RATE)]
    results = {
        language: next(
            iter(
                transcribe(
                    model, tokenizer, source, prompt=Prompt(language, language), config=config
                )
            )
        )
        for language in ("ja", "de")
    }
    for language, space in (("ja", ""), ("de", " ")):
        result = results[language]
        assert result.text == space.join(s.text for s in result.segments if s.text)
    assert results["ja"].text != results["de"].text


def test_no_chunk_is_longer_than_the_encoder_can_take(model, tokenizer, noise) -> None:
    encoder = replace(model.config.encoder, max_frames=25)
    limited = ASRModel(replace(model.config, encoder=encoder), tokenizer.vocab_size).eval()
    (result,) = transcribe(limited, tokenizer, [Waveform("long", noise(7.0), RATE)])
    assert len(result.segments) >= 4
    assert max(s.end - s.start for s in result.segments) <= 2.0


def test_the_speed_counts_loading(model, tokenizer, waveforms, monkeypatch) -> None:
    clock = iter([10.0, 12.0, 14.0])
    monkeypatch.setattr("effasr.transcription.transcribe.time.perf_counter", lambda: next(clock))
    run = transcribe(model, tokenizer, [waveforms[1], waveforms[3]])
    assert run.rtfx == 0.0
    assert len(list(run)) == 2
    assert run.seconds == 4.0
    assert run.rtfx == pytest.approx((5.1 + 3.3) / 4.0, abs=1e-3)


@pytest.fixture
def small_memory(monkeypatch):
    """Returns a setter of how many utterances a batch may have before memory runs out."""
    encode, batches = ASRModel.encode, []

    def limit(most: int) -> list[int]:
        def limited(model, batch):
            if len(batch.ids) > most:
                raise torch.OutOfMemoryError
            batches.append(len(batch.ids))
            return encode(model, batch)

        monkeypatch.setattr(ASRModel, "encode", limited)
        return batches

    return limit


@pytest.mark.parametrize("method", ["attention", "ctc"])
def test_a_batch_too_big_for_the_memory_is_halved_and_a_chunk_reported(
    method, model, tokenizer, waveforms, small_memory
) -> None:
    options = {"method": method, "fallback": False}
    expected = _texts(model, tokenizer, waveforms, **options)
    batches = small_memory(2)
    assert _texts(model, tokenizer, waveforms, **options) == expected
    assert batches == [2, 2, 2, 2]
    small_memory(0)
    config = DecodingConfig(method=method)
    (result,) = transcribe(model, tokenizer, waveforms[:1], config=config)
    assert "lower `chunk_seconds`" in result.reason


def test_what_is_in_the_slots_when_memory_runs_out_is_decoded_again(
    model, tokenizer, waveforms, monkeypatch
) -> None:
    config = {"frame_budget": 60}
    expected = _texts(model, tokenizer, waveforms, **config)
    admit, calls, failed = DecoderState.admit, [], []

    def limited(state, rows, *others):
        calls.append(len(rows))
        if len(calls) > 2 and int(state.going.sum()) + len(rows) > 1:
            failed.append(int(state.going.sum()))
            raise torch.OutOfMemoryError
        admit(state, rows, *others)

    monkeypatch.setattr(DecoderState, "admit", limited)
    assert _texts(model, tokenizer, waveforms, **config) == expected
    assert failed[0] > 0, "the test needs an utterance in a slot when it happens"


def test_slots_that_exceed_the_memory_are_halved(model, tokenizer, waveforms, monkeypatch) -> None:
    expected = _texts(model, tokenizer, waveforms)
    begin, slots = Engine.__init__, []

    def limited(engine, *arguments, **options):
        slots.append(options["slots"])
        if slots[-1] > 2:
            raise torch.OutOfMemoryError
        begin(engine, *arguments, **options)

    monkeypatch.setattr(Engine, "__init__", limited)
    assert _texts(model, tokenizer, waveforms) == expected
    assert slots == [32, 16, 8, 4, 2]


@pytest.mark.parametrize("method", ["attention", "ctc"])
def test_an_error_of_ours_is_not_taken_for_a_bad_file(
    method, model, tokenizer, waveforms, monkeypatch
) -> None:
    def broken(*args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(ASRModel, "encode", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        list(transcribe(model, tokenizer, waveforms, config=DecodingConfig(method=method)))


def test_bfloat16_computes_in_bfloat16(model, tokenizer, waveforms, monkeypatch) -> None:
    forward, seen = FeedForward.forward, []

    def watched(module, x, *others, **options):
        y = forward(module, x, *others, **options)
        seen.append((len(x), y.dtype))
        return y

    monkeypatch.setattr(FeedForward, "forward", watched)
    monkeypatch.setattr(recognizer, "rounds_to_bfloat16", lambda: False)  # as on a GPU: autocast
    config = DecodingConfig(precision="bfloat16")
    (result,) = transcribe(model, tokenizer, waveforms[:1], config=config)
    assert isinstance(result, Transcription)
    assert {dtype for _, dtype in seen} == {torch.bfloat16}
    assert GROUP in {rows for rows, _ in seen}, "the decoder's steps must be among them"


def test_a_request_may_fail_in_any_way(model, tokenizer, waveforms) -> None:
    def broken():
        raise KeyError("codec")

    requests = [
        Request("broken", broken, Prompt()),
        Request("no such language", lambda: waveforms[0].samples, Prompt("fr", "fr")),
        Request("good", lambda: waveforms[0].samples, Prompt()),
    ]
    first, second, third = Recognizer(model, tokenizer).results(requests)
    assert first == Failure("broken", "KeyError: 'codec'")
    assert isinstance(second, Failure)
    assert "'fr'" in second.reason
    assert isinstance(third, Transcription)


def test_lines_of_text_and_of_json(model, tokenizer, waveforms) -> None:
    (result,) = transcribe(model, tokenizer, waveforms[3:4])
    assert render(result, "text") == f"w3\t{result.text}\n"
    row = json.loads(render(result, "jsonl"))
    assert list(row) == ["id", "duration", "text", "vad", "segments"]
    assert row["duration"] == 3.3
    (segment,) = row["segments"]
    assert (segment["start"], segment["end"], segment["text"]) == (0.0, 3.3, result.text)
    assert ("truncated" in segment) == result.truncated
    failure = Failure("x.wav", "there is no such file.")
    assert render(failure, "text") == "x.wav\tfailed: there is no such file.\n"
    assert json.loads(render(failure, "jsonl")) == {"id": "x.wav", "error": failure.reason}


def test_what_repeats_itself_is_decoded_again(model, tokenizer, waveforms) -> None:
    plain = list(transcribe(model, tokenizer, waveforms, config=DecodingConfig(fallback=False)))
    cut = [result.truncated or repeats(tokenizer.encode(result.text, "en")) for result in plain]
    assert True in cut
    assert False in cut
    by_ctc = _texts(model, tokenizer, waveforms, method="ctc")
    results = list(transcribe(model, tokenizer, waveforms))
    assert not any(result.truncated for result in results)
    for index, is_cut in enumerate(cut):
        expected = by_ctc[index] if is_cut else plain[index].text
        assert results[index].text == expected
        (segment,) = results[index].as_row()["segments"]
        assert segment.get("fallback") == ("repetition" if is_cut else None)
    # CTC does not translate.
    prompt = Prompt("en", "de", "translate")
    translated = _texts_of(model, tokenizer, waveforms, prompt, DecodingConfig())
    unique = DecodingConfig(no_repeat_ngram=4)
    assert set(translated) & set(_texts_of(model, tokenizer, waveforms, prompt, unique))
    assert translated != _texts_of(
        model, tokenizer, waveforms, prompt, DecodingConfig(fallback=False)
    )


def test_what_is_unlikely_is_decoded_again(model, tokenizer, noise, tmp_path, monkeypatch) -> None:
    """By CTC, and translations, which it cannot write, by temperatures; if that is not unlikely."""
    sources = [Waveform(str(seed), noise(0.5, seed=seed), RATE) for seed in range(8)]

    def segments(prompt=None, **options):
        config = DecodingConfig(confidence=True, **options)
        results = transcribe(model, tokenizer, sources, prompt=prompt, config=config)
        return [segment for result in results for segment in result.segments]

    plain = segments(fallback=False)
    doubted = [not s.truncated and not repeats(tokenizer.encode(s.text, "en")) for s in plain]
    by_ctc = segments(method="ctc")
    least = next(
        (before.confidence + other.confidence) / 2
        for before, other, is_doubted in zip(plain, by_ctc, doubted, strict=True)
        if is_doubted and other.confidence > before.confidence
    )
    kinds = set()
    for before, other, is_doubted, segment in zip(
        plain, by_ctc, doubted, segments(fallback_confidence=least), strict=True
    ):
        is_likelier = is_doubted and before.confidence < least <= other.confidence
        reason = "low_likelihood" if is_likelier else None if is_doubted else "repetition"
        assert segment.fallback == reason
        assert segment.text == (before if reason is None else other).text
        kinds.add((reason, before.confidence < least))
    assert kinds >= {("low_likelihood", True), (None, True), (None, False)}
    temperatures, weights = [], []

    def draw(*arguments):
        temperature = arguments[4].temperature
        if not temperature:
            return decode(*arguments)
        weights.append(arguments[4].effective_lm_weight)
        temperatures.append(temperature)
        return [Decoded((5, 6), score=Score(-0.1 if temperature > 0.5 else -9.0, 1))]

    monkeypatch.setattr(recognizer, "decode", draw)
    drawn = segments(Prompt("de", "en", "translate"), fallback_confidence=0.6)
    replaced = [segment for segment in drawn if segment.fallback == "low_likelihood"]
    assert {segment.text for segment in replaced} == {tokenizer.decode([5, 6]).strip()}
    assert temperatures == [0.2, 0.4, 0.6] * len(replaced)
    # A language model keeps its weight.
    lines = ["\\data\\", "ngram 1=2", "\\1-grams:", "-9\t<unk>", "-1\t</s>", "\\end\\"]
    (tmp_path / "lm.arpa").write_text("\n".join(lines) + "\n")
    weights.clear()
    segments(
        Prompt("de", "en", "translate"),
        fallback_confidence=0.6,
        lm=tmp_path / "lm.arpa",
        lm_weight=0.9,
    )
    assert set(weights) == {0.9}


def _texts_of(model, tokenizer, waveforms, prompt, config) -> list[str]:
    return [
        result.text
        for result in transcribe(model, tokenizer, waveforms, prompt=prompt, config=config)
    ]


def test_repeated_sequences() -> None:
    assert repeats([1] * 8)
    assert repeats([5, *[1, 2, 3] * 8])
    assert not repeats([1] * 7)
    assert not repeats([1, 2, 3] * 7)
    assert not repeats(list(range(100)))
    assert not repeats([])


def test_unlikely_text_of_no_speech_is_left_out(model, tokenizer, noise) -> None:
    """With silero, a short recording without detected speech; with --gap 0, a silent chunk."""
    sources = [
        Waveform("silent", np.zeros(3 * RATE, np.float32), RATE),
        Waveform("spoken", noise(3.0), RATE),
    ]
    options = {"gap_seconds": None, "method": "ctc", "confidence": True}
    written = list(transcribe(model, tokenizer, sources, config=DecodingConfig(**options)))
    assert written[0].text
    sure = written[0].segments[0].confidence
    for threshold, is_written in ((sure * 0.9, True), (min(1.0, sure * 1.1), False)):
        config = DecodingConfig(no_speech=threshold, gap_seconds=None, method="ctc")
        silent, spoken = transcribe(model, tokenizer, sources, config=config)
        assert bool(silent.text) == is_written
        assert silent.segments[0].score is None
        assert spoken.text == written[1].text


def test_alternatives_of_a_recording_are_the_best_combinations() -> None:
    draw = np.random.default_rng(0)
    lists = [
        [
            Alternative(f"{n}{k}", rank, rank)
            for k, rank in enumerate(sorted(-draw.random(size))[::-1])
        ]
        for n, size in enumerate((5, 3, 5, 1))
    ]
    each_item = sorted((sum(item.rank for item in row) for row in product(*lists)), reverse=True)
    result = joined(lists)
    assert [item.rank for item in result] == pytest.approx(each_item[:5])
    assert result[0].text == "00 10 20 30"
    assert len({item.text for item in result}) == 5
    assert joined([]) == joined([lists[0], []]) == ()
    assert (
        joined([[Alternative("a", -1.0, -1.0)], [Alternative("b", -1.0, -1.0)]], "")[0].text == "ab"
    )
    assert Alternative("", -math.inf, -1.0).as_row() == {"text": "", "score": None}


@pytest.mark.parametrize("method", ["attention", "ctc"])
@pytest.mark.parametrize("beam", [1, 3])
def test_long_recordings_have_lists_of_their_own(method, beam, model, tokenizer, noise) -> None:
    waveform = Waveform("long", noise(3.5, seed=2), RATE)
    config = DecodingConfig(
        method=method, beam=beam, nbest=beam, chunk_seconds=1.0, search_seconds=0.2, extra_tokens=3
    )
    (result,) = transcribe(model, tokenizer, [waveform], config=config)
    assert len(result.segments) > 2
    assert result.alternatives[0].text == result.text
    assert 1 <= len(result.alternatives) <= beam
    for segment in result.segments:
        row = segment.as_row()["alternatives"]
        assert row[0]["text"] == segment.text
        assert all(item["score"] < 0 for item in row)


def test_commands_write_alternatives(effasr, saved, noise, tmp_path) -> None:
    sounds = [noise(0.8 + 0.4 * number, seed=number) for number in range(3)]
    manifest, out = write_set(tmp_path, sounds, ["one two three"] * 3), tmp_path / "out"
    options = ("--run", saved, "--device", "cpu", "--method", "ctc", "--beam", "4")
    segment = effasr("transcribe", *options, tmp_path / "u1.wav", "--nbest", "3", "--json").segment
    assert len(segment["alternatives"]) == 3
    assert segment["alternatives"][0]["text"] == segment["text"]
    command = ("evaluate", *options, "--manifest", manifest, "--output", out)
    assert "of 4 alternatives (oracle)" in effasr(*command, "--nbest", "4").out
    result = json.loads((out / "wer.json").read_text())
    assert result["oracle"]["nbest"] == 4
    assert result["oracle"]["wer"] <= result["wer"]
    for row in read_lines(out / "hypotheses.jsonl"):
        assert row["alternatives"][0]["text"] == row["hypothesis"]
        scores = [item["score"] for item in row["alternatives"]]
        assert scores == sorted(scores, reverse=True)
    assert effasr(*command).code == 0
    assert "oracle" not in json.loads((out / "wer.json").read_text())
