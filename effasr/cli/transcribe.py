"""``effasr transcribe``: recordings or a stream to text, subtitles or word timestamps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, TYPE_CHECKING

from effasr.checks import check
from effasr.cli.options import (
    CONFIDENCE,
    NBEST,
    RUN_HELP,
    AddCommand,
    add_decoding,
    add_fields,
    add_model,
    add_positional,
    add_prompt,
    assumes_language,
    at_least,
    decoding_config,
    folder,
    group,
    load_checkpoints,
    log,
    seconds,
    with_prompt_options,
)
from effasr.cli.progress import decoding_progress, erase_line
from effasr.decoding.config import BOOST, LONG_FORM, SECOND_PASS

if TYPE_CHECKING:
    from effasr.checkpoint import LoadedModel
    from effasr.data.prompt import Prompt
    from effasr.decoding.config import DecodingConfig
    from effasr.transcription.inputs.sources import Source
    from effasr.transcription.outputs.cues import CueLayout
    from effasr.transcription.outputs.writers import Style
    from effasr.transcription.results import Segment


_INTERRUPTED = 130  # exit code


def add(command: AddCommand) -> None:
    parser = command(
        "transcribe",
        run,
        "Transcribe audio files of any rate and length: name, tab, text.",
        "WAV, FLAC, Ogg, Opus, MP3 and what else libsndfile reads; with ffmpeg on the PATH also",
        "the sound of MP4, M4A, WebM and whatever it reads. Quote a pattern such as 'in/**/*.wav'",
        "where the shell's would be too long. Put -- before a name that begins with a dash.",
        "",
        "With --stream, raw samples on standard input are transcribed while they arrive:",
        "  arecord -t raw -f S16_LE -r 16000 | effasr transcribe RUN --stream",
        "A model that is trained with a limited context decodes frame by frame; --latency 480ms",
        "takes its longest chunk up to that, with --beam, --nbest, --confidence and (CTC) --lm.",
        "Others wait for pauses.",
        "Every --format is allowed; the output is a complete file at any time.",
        "",
        "What cannot be read is reported in a line of its own and the rest goes on; the exit code",
        "is 1 then. Standard output has results alone.",
        example="effasr transcribe runs/mine calls --output texts --format srt",
    )
    add_positional(parser, "run", "RUN", RUN_HELP, required=True)
    text = (
        "an audio file, a folder of such, a pattern (*, ?, [..] and ** for any depth), or - for "
        "standard input: a list of files, one a line, or the audio of one"
    )
    add_positional(parser, "files", "FILE", text, kind=str, many=True, option=False)
    add_model(parser)
    inputs, outputs = group(parser, "recordings and batches"), group(parser, "output")
    inputs.add_argument(
        "--manifest",
        type=Path,
        help="recordings to transcribe as well, in the languages that it names: NeMo JSONL, lhotse "
        "cuts, a Kaldi or prepared folder",
    )
    add_prompt(parser, "language spoken in recordings whose manifest does not name one")
    inputs.add_argument(
        "--track",
        type=at_least(0),
        metavar="N",
        help="audio track of containers such as MKV, from 0 (default: 0); needs ffmpeg",
    )
    channel = inputs.add_mutually_exclusive_group()
    channel.add_argument(
        "--channel",
        type=at_least(0),
        metavar="N",
        help="transcribe one channel, from 0 as `channel` of manifests (default: the mean of all)",
    )
    channel.add_argument(
        "--per-channel",
        action="store_true",
        help="transcribe each channel on its own, such as the speakers of a call, with its number",
    )
    outputs.add_argument(
        "--format",
        choices=("text", "json", "srt", "vtt", "ctm"),
        default="text",
        help="text (the default), JSON lines with the times of segments, subtitles, or NIST's CTM",
    )
    outputs.add_argument("--json", action="store_true", help="the same as --format json")
    add_fields(outputs, "words", "timestamps")
    outputs.add_argument(
        "--cues", action="store_true", help="with --json, also write the cues that subtitles have"
    )
    outputs.add_argument(
        "--line-width",
        type=at_least(1),
        metavar="N",
        help="columns of a line of subtitles; full-width characters take two (default: 42)",
    )
    outputs.add_argument(
        "--lines", type=at_least(1), metavar="N", help="lines of a cue of subtitles (default: 2)"
    )
    outputs.add_argument(
        "--cue-seconds", type=seconds, metavar="S", help="longest cue of subtitles (default: 7)"
    )
    outputs.add_argument(
        "--output",
        type=folder,
        metavar="FOLDER",
        help="write a file for each recording, in folders as theirs (default: all to standard "
        "output)",
    )
    outputs.add_argument(
        "--continue",
        dest="continued",
        action="store_true",
        help="skip recordings that have an output file in --output",
    )
    stream = parser.add_argument_group("standard input as audio")
    stream.add_argument(
        "--stream",
        action="store_true",
        help="transcribe raw samples from standard input, a line for each stretch between pauses",
    )
    stream.add_argument(
        "--sample-rate", type=at_least(1), metavar="HZ", help="sample rate (default: 16000)"
    )
    stream.add_argument(
        "--channels", type=at_least(1), metavar="N", help="number of channels (default: 1)"
    )
    stream.add_argument(
        "--encoding", choices=("s16le", "f32le"), help="sample format (default: s16le)"
    )
    stream.add_argument(
        "--latency",
        type=seconds,
        metavar="S",
        help="longest delay, such as 480ms: the longest chunk of a model with a limited context, "
        "which decodes frame by frame (default: its first), or the longest wait for a pause with "
        "other models (default: 10 seconds)",
    )
    add_decoding(parser, LONG_FORM, BOOST, NBEST, SECOND_PASS, CONFIDENCE)


def run(options: argparse.Namespace) -> int:
    decoding = decoding_config(options)
    _check(options, decoding)
    layout = _cue_layout(options)
    if not decoding.words and decoding.second_lm is None and (layout or _style(options) == "ctm"):
        decoding = replace(decoding, words=None)
    loaded, _ = load_checkpoints(options)
    default = loaded.prompt.stating(options.language)
    if options.stream:
        return _stream(options, loaded, with_prompt_options(default, options), decoding, layout)
    with NamedTemporaryFile(prefix="effasr-", suffix=".stdin") as copy:
        sources = _sources(options, default, copy, warn=assumes_language(options, loaded))
        prompt = with_prompt_options(default, options)
        return _files(options, loaded, sources, prompt, decoding, layout)


def _files(
    options: argparse.Namespace,
    loaded: LoadedModel,
    sources: list[Source],
    prompt: Prompt,
    decoding: DecodingConfig,
    layout: CueLayout | None,
) -> int:
    """Transcribe recordings, writing each when it is complete."""
    from effasr.transcription.inputs.arrival import Interruption
    from effasr.transcription.outputs.writers import ResultWriter
    from effasr.transcription.results import Failure, Transcription
    from effasr.transcription.transcribe import transcribe

    writer = ResultWriter(_style(options), options.output, sources, layout)
    if options.continued:
        every, sources = len(sources), writer.missing(sources)
        have = every - len(sources)
        _note(f"skipping {have} of {every} recordings that have an output file")
    complete, failed, missing = 0, 0, _Shortcomings()
    is_shared = options.output is None and sys.stdout.isatty()
    with (
        Interruption() as interruption,
        decoding_progress(len(sources), "recordings") as progress,
    ):
        results = transcribe(
            loaded.model,
            loaded.tokenizer,
            sources,
            prompt=prompt,
            config=decoding,
            on_audio=progress.add_audio,
            interruption=interruption,
        )
        for result in results:
            if is_shared:
                erase_line()
            problem = writer.write(result)
            if isinstance(result, Transcription):
                missing.add(result.segments)
            problem = result if isinstance(result, Failure) else problem
            reason = None if problem is None else problem.reason
            if isinstance(result, Transcription) and result.warning is not None:
                _note(f"{result.id}: {result.warning}")
            if isinstance(result, Transcription) and result.partial is not None:
                reason = f"{result.id}: only {result.duration:.1f} s: {result.partial}"
            complete += reason is None
            if reason is not None:
                failed += 1
                _note(reason)
            progress.done()
    missing.report(options)
    if decoding.vad == "auto" and results.vad == "loudness":
        _note("noise may be taken for speech: pip install 'effasr[vad]', or choose --vad loudness")
    if interruption.requested:
        again = "" if options.output is None else "; --continue transcribes the others"
        _note(f"interrupted after {complete} of {len(sources)} recordings{again}")
        return _INTERRUPTED
    sys.stderr.write(
        f"{results.audio_seconds:.1f} s of audio in {results.seconds:.1f} s, RTFx "
        f"{results.rtfx:.1f}, speech detected by {results.vad}"
        + (f", {failed} failed\n" if failed else "\n")
    )
    return 1 if failed else 0


def _stream(
    options: argparse.Namespace,
    loaded: LoadedModel,
    prompt: Prompt,
    decoding: DecodingConfig,
    layout: CueLayout | None,
) -> int:
    """Transcribe standard input, writing each segment as soon as it is known."""
    from effasr.data.prompt import WITHOUT_SPACES
    from effasr.transcription.inputs.arrival import Interruption
    from effasr.transcription.online import online_recognizer, transcribe_online
    from effasr.transcription.outputs.writers import StreamWriter
    from effasr.transcription.recognizer import Recognizer
    from effasr.transcription.streaming import RawFormat, raw_blocks, transcribe_stream

    interruption = Interruption()
    form = RawFormat(
        sample_rate=options.sample_rate or 16_000,
        channels=options.channels or 1,
        encoding=options.encoding or "s16le",
    )
    # Without a buffer: its lock would keep a process alive that a signal ends.
    source = getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)
    blocks = raw_blocks(source, form, loaded.model.config.features.sample_rate)
    if _is_online(loaded, prompt, decoding):
        online = online_recognizer(
            loaded.model,
            loaded.tokenizer,
            decoding,
            latency_seconds=options.latency,
            spaces=prompt.target not in WITHOUT_SPACES,
            prompt=prompt,
        )
        segments = transcribe_online(online, blocks, interruption)
    else:
        recognizer = Recognizer(loaded.model, loaded.tokenizer, decoding)
        latency = 10.0 if options.latency is None else options.latency
        if latency < 1.0:
            raise ValueError(
                "`--latency` must be at least 1 s with a model that was not trained with limited "
                f"contexts (model.encoder.context), but is {latency:g} s."
            )
        segments = transcribe_stream(
            recognizer, blocks, prompt, latency_seconds=latency, interruption=interruption
        )
    missing, writer = _Shortcomings(), StreamWriter(_style(options), "stream", layout)
    with interruption:
        for segment in segments:
            writer.write(segment)
            missing.add([segment])
    missing.report(options)
    return _INTERRUPTED if interruption.requested else 0


def _is_online(loaded: LoadedModel, prompt: Prompt, decoding: DecodingConfig) -> bool:
    """Return whether to decode frame by frame: if the model can, and no option prevents it."""
    from effasr.transcription.online import is_streamable

    if not is_streamable(loaded.model) or decoding.method in ("attention", "language_model"):
        return False
    if not prompt.monotonic:
        _note("decoding at pauses, not frame by frame, because of --target-language")
    return prompt.monotonic


def _style(options: argparse.Namespace) -> Style:
    return "json" if options.json else options.format


def _cue_layout(options: argparse.Namespace) -> CueLayout | None:
    """Return the size of cues, if any are to be written."""
    from effasr.transcription.outputs.cues import CueLayout

    names = "line_width", "lines", "cue_seconds"
    sizes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    style = _style(options)
    if options.cues and style != "json":
        raise ValueError(
            f"`--cues` must have `--json`, but the format is {style}: add `--json`, or write "
            "`--format srt` or `--format vtt` alone."
        )
    if options.cues or style in ("srt", "vtt"):
        return CueLayout(**sizes)
    for name, value in sizes.items():
        raise ValueError(
            f"`--{name.replace('_', '-')}` must be left out without subtitles, but is {value:g}: "
            "add `--format srt`, `--format vtt` or `--json --cues`."
        )
    return None


class _Shortcomings:
    """Counts segments without word timestamps, and those whose text was cut."""

    def __init__(self) -> None:
        self._count = self._all = self._truncated = 0

    def add(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            self._count += segment.words is None or bool(segment.text and not segment.words)
            self._truncated += segment.truncated
            self._all += 1

    def report(self, options: argparse.Namespace) -> None:
        as_ctm = _style(options) == "ctm"
        if self._count and (options.words or as_ctm):
            what = f"{self._count} of {self._all} segments have no word timestamps"
            _note(what + ("; their words divide the time evenly" if as_ctm else ""))
        if self._truncated:
            _note(
                f"{self._truncated} of {self._all} segments were cut at the maximum length of a "
                "text, so they probably repeat themselves: try --chunk 10, or --beam 4 "
                "--ctc-weight 0.3 with a CTC head"
            )


def _check(options: argparse.Namespace, decoding: DecodingConfig) -> None:
    if options.words and _style(options) == "text":
        raise ValueError(
            "`--words` must have a format that holds the times of words, but the format is text: "
            "add `--format json` or `--format ctm`."
        )
    listed = options.nbest is not None and decoding.second_lm is None
    if listed and _style(options) != "json":
        raise ValueError(
            "`--nbest` must have `--json`, because no other format holds several texts, but the "
            f"format is {_style(options)}: add `--json`."
        )
    if options.word_confidence and _style(options) != "json":
        raise ValueError(
            "`--confidence` must have `--json`, because no other format holds confidences, but the "
            f"format is {_style(options)}: add `--json`."
        )
    if options.stream:
        _check_stream(options, decoding)
        return
    for name in ("sample_rate", "channels", "encoding", "latency"):
        if getattr(options, name) is not None:
            raise ValueError(
                f"`--{name.replace('_', '-')}` must be left out without `--stream`, but is "
                f"{getattr(options, name)}: the header of a file gives its format."
            )
    if not options.files and options.manifest is None:
        raise ValueError(
            "`FILE` or `--manifest` must be given, but both are missing: name a recording."
        )
    if options.continued and options.output is None:
        raise ValueError(
            "`--continue` must have `--output`, whose files it looks for, but that is missing: add "
            "`--output FOLDER`."
        )


def _check_stream(options: argparse.Namespace, decoding: DecodingConfig) -> None:
    if decoding.second_lm is not None:
        raise ValueError(
            "`--second-lm` must be left out with `--stream`: it reads the earlier segments of a "
            "recording, which is transcribed as a whole."
        )
    rule = "be chunked with `--stream`, which is cut at pauses"
    remedy = "transcribe a file"
    check(decoding.long_form != "sequential", "--long-form", rule, "sequential", remedy)
    if options.files not in ([], ["-"]) or options.manifest is not None:
        raise ValueError(
            "`--stream` must have no other input than standard input: leave out FILE and "
            "--manifest."
        )
    for name in ("track", "channel", "per_channel"):
        if getattr(options, name) not in (None, False):
            raise ValueError(
                f"`--{name.replace('_', '-')}` must be left out with `--stream`, whose samples are "
                "one track and the mean of its channels."
            )
    if options.output is not None or options.continued:
        raise ValueError(
            "`--stream` must write to standard output: leave out `--output` and `--continue`."
        )


def _sources(
    options: argparse.Namespace, default: Prompt, copy: IO[bytes], *, warn: bool
) -> list[Source]:
    from effasr.transcription.inputs.sources import find, of_manifest
    from effasr.transcription.inputs.stdin import sources_on_stdin

    sources = find(name for name in options.files if name != "-")
    if "-" in options.files:
        sources += sources_on_stdin(sys.stdin.buffer, copy)
    if options.manifest is not None:
        listed = of_manifest(options.manifest, prompt=default, warn=warn)
        sources += [
            replace(item, prompt=with_prompt_options(item.prompt or default, options))
            for item in listed
        ]
    sources = [replace(source, track=options.track or 0) for source in sources]
    # A manifest that names a channel goes first.
    return [
        replace(source, channel=options.channel, per_channel=options.per_channel)
        if source.channels is None and source.cut is None
        else source
        for source in sources
    ]


def _note(text: str) -> None:
    from effasr.transcription.json_files import one_line

    log("transcribe", one_line(text))
