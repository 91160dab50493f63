"""Configuration of audio augmentation."""

from dataclasses import dataclass, field

from effasr.checks import check

Paths = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseConfig:
    """Noise that is added to speech.

    Attributes:
        manifests: Folders of audio files, or manifests of any kind that
            `effasr.data.manifest.reader.read` takes; JSON lines need no texts.
        probability: The share of utterances that get noise.
        snr: Least and greatest signal-to-noise ratio in dB, by the root mean squares of the
            utterance and of the noise under it; drawn uniformly.
    """

    manifests: Paths = field(default=(), metadata={"remote": True})
    probability: float = 0.5
    snr: tuple[float, float] = (5.0, 20.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "manifests", _paths(self.manifests))
        rule = "name at least one folder or manifest of noise"
        check(self.manifests, "manifests", rule, "empty", "leave `noise` null to train without")
        _check_probability("noise", self.probability)
        low, high = self.snr
        rule = "be the least and the greatest ratio in dB, both from -50 to 100"
        check(-50 <= low <= high <= 100, "snr", rule, f"[{low:g}, {high:g}]", "[5, 20] is usual")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReverberationConfig:
    """The sound of rooms.

    Attributes:
        manifests: Folders or manifests of recorded impulse responses, as those of noise.
        simulated: Whether every utterance is heard in a simulated room of its own, in place of
            recorded ones; see `effasr.data.audio.augmentation.rooms`.
        probability: The share of utterances that get reverberation.
        decay_time: Least and greatest time of simulated rooms in seconds in which sound
            decays by 60 dB (T60); drawn uniformly.
    """

    manifests: Paths = field(default=(), metadata={"remote": True})
    simulated: bool = False
    probability: float = 0.5
    decay_time: tuple[float, float] = (0.1, 0.8)

    def __post_init__(self) -> None:
        object.__setattr__(self, "manifests", _paths(self.manifests))
        if bool(self.manifests) == self.simulated:
            both = "both are" if self.simulated else "neither is"
            raise ValueError(
                f"either `manifests` or `simulated: true` must be given, but {both}: leave "
                "`reverberation` null to train without."
            )
        _check_probability("reverberation", self.probability)
        low, high = self.decay_time
        rule = "be the least and the greatest time in seconds, both from 0.1 to 3"
        remedy = "[0.1, 0.8] is usual"
        check(0.1 <= low <= high <= 3, "decay_time", rule, f"[{low:g}, {high:g}]", remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class TelephoneConfig:
    """Sound as a telephone carries it: 8 kHz, in 8 bits of mu-law.

    Attributes:
        probability: Share of utterances that get the telephone channel.
    """

    probability: float = 0.1

    def __post_init__(self) -> None:
        _check_probability("telephone", self.probability)


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioAugmentationConfig:
    """Augmentations of the audio of training utterances, in this order; by default none.

    There is no random gain: features are normalised per utterance, which takes it away again.
    Speeds are in `effasr.data.config.DataConfig`, because they change lengths; masks of features
    are in `effasr.data.features.spec_augment.SpecAugmentConfig`.

    Attributes:
        reverberation: Reverberation of a room.
        noise: Noise that is added to the speech.
        telephone: Bandwidth and quantisation.
    """

    reverberation: ReverberationConfig | None = None
    noise: NoiseConfig | None = None
    telephone: TelephoneConfig | None = None


def _paths(value: Paths) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _check_probability(section: str, value: float) -> None:
    rule = "be greater than 0 and at most 1"
    remedy = f"leave `{section}` null to train without"
    check(0 < value <= 1, "probability", rule, f"{value:g}", remedy)
