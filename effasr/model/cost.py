"""Forward FLOPs of an utterance, computed from the sizes of a model's layers."""

from dataclasses import replace

from effasr.checks import check
from effasr.data.sampling.cost import FACTORS, CostModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.language_model.architecture import ModelSizes, model_sizes
from effasr.model.language_model.config import LanguageModelConfig
from effasr.model.transducer import TransducerConfig
from effasr.model.wav2vec2_encoder import Wav2Vec2EncoderConfig
from effasr.model.whisper_encoder import WhisperEncoderConfig
from effasr.nn.attention import GatedBiasSelfAttention
from effasr.nn.experts import ExpertsConfig
from effasr.nn.subsampling import bands


def cost_model(config: ModelConfig, vocab_size: int) -> CostModel:
    """Forward FLOPs of an utterance by its lengths, for planning.

    A mean over the contexts of the encoder is counted, if there are several. Matrix products and
    convolutions are counted, as by `torch.utils.flop_counter.FlopCounterMode`. The table of
    relative positions is not, as it does not grow with the utterance. All decoder tokens but the
    first of a prompt count as text, as lengths do not tell them apart. Tokens of a language model
    are its rows, and clips of a conversation count as one.
    """
    check(vocab_size >= 1, "vocab_size", "be at least 1", vocab_size)
    width = config.encoder.width
    frame, frame_pair = _encoder(config)
    frame += best_rq_cost(config)
    if (prompt := config.language_prompt) is not None:
        frame += 2 * prompt.width * (2 * width + prompt.count)
    token = token_pair = token_frame = 0
    if config.ctc:
        frame += 2 * width * (vocab_size + 1)
    if config.decoder is not None:
        if config.decoder.width != width:
            frame += 2 * width * config.decoder.width
        per_frame, token, token_pair, token_frame = _decoder(config.decoder, vocab_size)
        frame += per_frame
    if config.language_model is not None:
        frame += adapter_cost(config.language_model, width)
        per_token, token_pair = _language_model(config.language_model)
        sizes = language_model_sizes(config.language_model)
        token = per_token + 2 * sizes.width * sizes.vocab_size
    if config.transducer is not None:
        frame += 2 * width * config.transducer.joint
        token += predictor_cost(config.transducer)
        classes = vocab_size + 1 + len(config.transducer.durations or ())
        token_frame += 2 * config.transducer.joint * classes
    encoder = config.encoder
    return CostModel(
        frame=frame,
        frame_pair=frame_pair,
        token=token,
        token_pair=token_pair,
        token_frame=token_frame,
        contexts=encoder.context if isinstance(encoder, FastConformerConfig) else (),
    )


def best_rq_cost(config: ModelConfig) -> int:
    """FLOPs per frame of the targets and softmaxes of BEST-RQ."""
    best_rq, features = config.best_rq, config.features
    if best_rq is None:
        return 0
    inputs = features.rows_per_frame * features.mel_bins
    target = best_rq.code_width * (inputs + best_rq.codes)
    return 2 * best_rq.codebooks * (target + config.encoder.width * best_rq.codes)


def text_cost_model(config: ModelConfig, vocab_size: int) -> CostModel | None:
    """Forward FLOPs of a text pair, whose frames are the tokens of the text encoder."""
    text, width = config.text_encoder, config.encoder.width
    if text is None:
        return None
    network = _network(width, text.feed_forward, text.experts)
    frame = text.layers * (2 * 4 * width**2 + network)
    pair = text.layers * 2 * 2 * width
    decoder = (0, 0, 0, 0)
    # What follows reads several rows for each token.
    repeats = text.upsample if text.shared_layers else 1
    if config.decoder is not None:
        if config.decoder.width != width:
            frame += repeats * 2 * width * config.decoder.width
        decoder = _decoder(config.decoder, vocab_size)
    if text.shared_layers:
        # The costs are linear in the number of layers; features are part of neither.
        per_row, per_pair = _encoder(config)
        share = text.shared_layers / config.encoder.layers
        frame += repeats * share * (per_row - subsampling_cost(config))
        pair += repeats**2 * share * per_pair
        frame += repeats * 2 * width * (vocab_size + 1) * config.ctc
        if config.transducer is not None:
            joint, classes = config.transducer.joint, vocab_size + 1
            classes += len(config.transducer.durations or ())
            frame += repeats * 2 * width * joint + predictor_cost(config.transducer)
            pair += repeats * 2 * joint * classes
    per_frame, token, token_pair, token_frame = decoder
    return CostModel(
        frame=frame + repeats * per_frame,
        frame_pair=pair,
        token=token,
        token_pair=token_pair,
        token_frame=repeats * token_frame,
    )


def recomputed_costs(
    config: ModelConfig, vocab_size: int, every: int, below: int = 0
) -> tuple[CostModel, CostModel | None]:
    """Return FLOPs that activation checkpointing repeats for an utterance, and for a text pair.

    The last product of a Transformer layer without dropout is not repeated: no gradient needs it,
    unless that of a router does.
    """
    encoder, decoder, text = config.encoder, config.decoder, config.text_encoder
    # The costs are linear in the number of layers.
    layers = _more(encoder.layers, every) - -(-below // every)
    more = replace(config, encoder=replace(encoder, layers=layers))
    unneeded = unneeded_frame = unneeded_text = 0
    keeps_last = isinstance(encoder, Wav2Vec2EncoderConfig) and (
        not encoder.pre_norm or encoder.adapter is not None
    )
    conformer = isinstance(encoder, FastConformerConfig)
    if not (conformer or keeps_last or encoder.residual_dropout):
        unneeded_frame = (layers - encoder.layers) * 2 * encoder.width * encoder.feed_forward
    if decoder is not None:
        more = replace(more, decoder=replace(decoder, layers=_more(decoder.layers, every)))
        if not decoder.residual_dropout and decoder.experts is None:
            layers = _more(decoder.layers, every) - decoder.layers
            unneeded = layers * 2 * decoder.width * decoder.feed_forward
    if text is not None:
        shared = _more(encoder.layers, every) - _more(encoder.layers - text.shared_layers, every)
        shared = min(shared, more.encoder.layers)
        text_more = replace(text, layers=_more(text.layers, every), shared_layers=shared)
        more = replace(more, text_encoder=text_more)
        if not text.residual_dropout and text.experts is None:
            layers = _more(text.layers, every) - text.layers
            unneeded_text = layers * 2 * encoder.width * text.feed_forward
    speech = _difference(cost_model(more, vocab_size), cost_model(config, vocab_size))
    speech = replace(speech, frame=speech.frame - unneeded_frame, token=speech.token - unneeded)
    if config.language_model is not None:
        sizes = language_model_sizes(config.language_model)
        share = -(-sizes.layers // every) / sizes.layers
        per_token, pair = _language_model(config.language_model)
        speech = replace(
            speech,
            token=speech.token + share * per_token,
            token_pair=speech.token_pair + share * pair,
        )
    with_more, once = text_cost_model(more, vocab_size), text_cost_model(config, vocab_size)
    if with_more is None or once is None:
        return speech, None
    pair = _difference(with_more, once)
    return speech, replace(pair, frame=pair.frame - unneeded_text, token=pair.token - unneeded)


def _difference(more: CostModel, less: CostModel) -> CostModel:
    return replace(more, **{name: getattr(more, name) - getattr(less, name) for name in FACTORS})


def _more(layers: int, every: int) -> int:
    """The number of layers, with the recomputed ones counted twice."""
    return layers + -(-layers // every)


def subsampling_cost(config: ModelConfig) -> int:
    """FLOPs per frame before the first encoder layer: features and convolutions."""
    encoder, width, bins = config.encoder, config.encoder.width, config.features.mel_bins
    if isinstance(encoder, Wav2Vec2EncoderConfig):
        flops, rows = 0, encoder.hop  # Rows of a frame: 64, 32, ... 1 after the convolutions
        for inputs, channels, kernel, stride in encoder.convolutions:
            rows //= stride
            flops += 2 * rows * kernel * inputs * channels
        return flops
    features = 2 * config.features.rows_per_frame * (config.features.n_fft // 2 + 1) * bins
    if isinstance(encoder, WhisperEncoderConfig):
        # Two rows of the first convolution, one of the second; 3 taps each.
        return features + 2 * 3 * width * (2 * bins + width)
    channels = encoder.subsampling_channels
    # Places of a frame after each convolution, of 3 x 3 taps: for 8, 4 x F/2, 2 x F/4, 1 x F/8.
    after = bands(bins, encoder.subsampling, causal=encoder.causal_subsampling)
    places = [encoder.subsampling // 2**n * count for n, count in enumerate(after, 1)]
    taps, pointwise = 2 * 9 * channels * sum(places), 2 * channels**2 * sum(places[1:])
    return features + taps + pointwise + 2 * channels * places[-1] * width


def _encoder(config: ModelConfig) -> tuple[int, int]:
    """FLOPs of features and encoder: per frame, and per pair of frames."""
    encoder = config.encoder
    width = encoder.width
    if not isinstance(encoder, FastConformerConfig):
        hidden = encoder.feed_forward + (getattr(encoder, "adapter", None) or 0)
        layer = 2 * 4 * width**2 + 2 * 2 * width * hidden
        layers = encoder.layers * layer
        if isinstance(encoder, Wav2Vec2EncoderConfig) and encoder.family != "moonshine":
            taps = encoder.position_kernel * width // encoder.position_groups
            layers += 2 * width * (encoder.channels + taps)
            if encoder.family == "wavlm":
                layers += encoder.layers * 2 * 8 * width  # Eight sums make a gate
        return subsampling_cost(config) + layers, encoder.layers * pair_cost(encoder)
    feed_forward = 2 * _network(width, encoder.feed_forward, encoder.experts)
    attention = 2 * 4 * width**2
    convolution = 2 * 3 * width**2 + 2 * encoder.conv_kernel * width
    layers = encoder.layers * (feed_forward + attention + convolution)
    return subsampling_cost(config) + layers, encoder.layers * pair_cost(encoder)


def pair_cost(encoder: FastConformerConfig | WhisperEncoderConfig | Wav2Vec2EncoderConfig) -> int:
    """FLOPs of attention of a layer per pair of frames."""
    width, is_gated = encoder.width, getattr(encoder, "family", None) == "wavlm"
    # Content and values; relative positions are a third product.
    products = 3 if is_gated or getattr(encoder, "position", None) == "relative" else 2
    return products * 2 * (width + is_gated * GatedBiasSelfAttention.spare * encoder.heads)


def _network(width: int, hidden: int, experts: ExpertsConfig | None) -> int:
    """FLOPs per row of a feed-forward network; of its experts those that the row uses."""
    dense = 2 * 2 * width * hidden
    if experts is None:
        return dense
    router = 2 * width * experts.count if experts.is_learned else 0
    return experts.top_k * dense + router


def _decoder(config: DecoderConfig, vocab_size: int) -> tuple[int, int, int, int]:
    """FLOPs per frame, token, pair of tokens, and pair of a token and a frame."""
    width, layers, inner = config.width, config.layers, config.heads * config.head_width
    # Query, key, value and output of self-attention; query and output of cross-attention.
    projections = 2 * 6 * width * inner
    feed_forward = _network(width, config.feed_forward, config.experts)
    if config.activation == "swiglu":
        feed_forward += 2 * width * config.feed_forward
    # A token sees u (u + 1) / 2 of the pairs: scores and values are two products.
    pair = 2 * inner
    token = layers * (projections + feed_forward + pair) + 2 * width * vocab_size
    return layers * 2 * 2 * width * inner, token, layers * pair, layers * 2 * 2 * inner


def language_model_sizes(config: LanguageModelConfig) -> ModelSizes:
    rule = "be the content of a config.json here"
    remedy = "read it from `path`"
    check(config.architecture is not None, "language_model.architecture", rule, "null", remedy)
    return model_sizes(config.architecture)


def adapter_cost(config: LanguageModelConfig, width: int) -> float:
    """FLOPs of the adapter per encoder frame of this width."""
    rows = language_model_sizes(config).width
    if config.adapter == "linear":
        return 2 * width * rows
    hidden = config.adapter_width or rows
    return 2 * width * hidden + 2 * hidden * rows / config.stack


def _language_model(config: LanguageModelConfig) -> tuple[int, int]:
    """FLOPs of the layers per row, and per pair of rows."""
    sizes = language_model_sizes(config)
    # A row sees u (u + 1) / 2 of the pairs: scores and values are two products.
    pairs = sizes.layers * 2 * sizes.attention
    return 2 * sizes.linear + pairs, pairs


def predictor_cost(config: TransducerConfig) -> int:
    """FLOPs per label, and for the row before the first."""
    width = config.width
    projection = 2 * width * config.joint
    if config.predictor == "lstm":
        # Four gates, each from the input and from the last output.
        return config.layers * 2 * 4 * 2 * width**2 + projection
    return 2 * config.context * width + projection
