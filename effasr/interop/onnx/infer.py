"""Transcribes 16 kHz recordings with the ONNX graphs beside this file: python infer.py FILE ..."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np


class Graphs:
    """Greedy search by CTC, where there is a head, else by the attention decoder."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime

        self.says = json.loads((folder / "onnx.json").read_text(encoding="utf-8"))
        self.sessions = {
            path.stem: onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            for path in folder.glob("*.onnx")
        }
        self.folder = folder

    def run(self, graph: str, **inputs: Any) -> dict[str, Any]:
        session = self.sessions[graph]
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(None, inputs), strict=True))

    def features(self, samples: np.ndarray) -> np.ndarray:
        """Return float32 (rows, mel_bins), as `features` of onnx.json defines them."""
        config, tables = self.says["features"], np.load(self.folder / "features.npz")
        width, hop, is_whisper = config["n_fft"], config["hop"], config["kind"] == "whisper"
        if is_whisper:
            whole = hop * self.says["subsampling_factor"]
            least = max(len(samples), config["minimum_s"] * config["sample_rate"])
            samples = np.pad(samples, (0, math.ceil(least / whole) * whole - len(samples)))
            behind: Any = "reflect" if config["minimum_s"] else "constant"
            signal = np.pad(samples, (width // 2, 0), "reflect")
            signal = np.pad(signal, (0, width // 2), behind)
        else:
            signal = np.append(samples[:1], samples[1:] - config["preemphasis"] * samples[:-1])
            signal = np.pad(signal, width // 2)
        windows = np.lib.stride_tricks.sliding_window_view(signal, width)[::hop]
        beside = (width - len(tables["window"])) // 2
        windows = windows[: len(samples) // hop] * np.pad(tables["window"], beside)
        mel = (np.abs(np.fft.rfft(windows)) ** 2 @ tables["filterbank"]).astype(np.float32)
        if is_whisper:
            mel = np.log10(np.maximum(mel, 1e-10))
            return (np.maximum(mel, mel.max() - 8) + 4) / 4
        mel = np.log(mel + 2**-24)
        return (mel - mel.mean(0)) / (mel.std(0, ddof=1) + 1e-5) if config["normalize"] else mel

    def tokens(self, features: np.ndarray, *, ctc: bool) -> list[int]:
        if not len(features):
            return []  # of a recording shorter than a window's hop
        encoded = self.run("encoder", features=features[None], lengths=np.array([len(features)]))
        if not ctc:
            return self._attention(encoded)
        best = encoded["ctc_log_probs"][0].argmax(-1)
        starts = np.flatnonzero(np.diff(best, prepend=-1))
        return [int(token) for token in best[starts] if token != self.says["blank_id"]]

    def _attention(self, encoded: dict[str, Any]) -> list[int]:
        sizes, read = self.says["decoder_step"], list(self.says["prompt"])
        keys = np.zeros((sizes["layers"], 1, sizes["heads"], 0, sizes["head_dim"]), np.float32)
        past, begin = {"past_keys": keys, "past_values": keys}, len(read)
        cross = {key: encoded[key] for key in ("cross_keys", "cross_values", "encoded_lengths")}
        for position in range(self.says["max_positions"]):
            place = {"tokens": np.array([read[position]]), "positions": np.array([position])}
            step = self.run("decoder_step", **place, **past, **cross)
            past = {"past_keys": step["keys"], "past_values": step["values"]}
            if position < begin - 1:
                continue
            logits = step["logits"][0, : self.says["tokens"]]
            logits[self.says.get("suppress", [])] = -np.inf
            if position == begin - 1:
                logits[self.says.get("begin_suppress", [])] = -np.inf
            read.append(int(logits.argmax()))
            if read[-1] == self.says["eos_id"]:
                return read[begin:-1]
        return read[begin:]

    def text(self, tokens: list[int]) -> str:
        if "pieces" not in self.says:
            import tokenizers

            return tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json")).decode(
                tokens
            )
        pieces = (self.says["pieces"][token] for token in tokens)
        return "".join(piece for piece in pieces if piece[0] != "<").replace("\u2581", " ").strip()


if __name__ == "__main__":
    import soundfile

    graphs = Graphs(Path(__file__).parent)
    for name in sys.argv[1:]:
        samples, rate = soundfile.read(name, dtype="float32")
        if rate != graphs.says["features"]["sample_rate"] or samples.ndim > 1:
            sys.exit(f"{name} must be mono at {graphs.says['features']['sample_rate']} Hz.")
        features = graphs.features(samples)
        text = graphs.text(graphs.tokens(features, ctc="blank_id" in graphs.says))
        sys.stdout.write(f"{text.strip()}\n")
