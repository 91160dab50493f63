"""Reads the language model and the phrases of a decoding configuration."""

from effasr.checks import check
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.decoding.lm.boosting import BoostTree, read_phrases
from effasr.decoding.lm.neural import load_neural_lm
from effasr.decoding.lm.ngram import TokenLM, load_ngrams
from effasr.decoding.lm.words import WordFusion, load_word_ngrams
from effasr.model.asr import ASRModel


def load_lm(config: DecodingConfig, model: ASRModel, tokenizer: Tokenizer) -> TokenLM | None:
    if config.lm is None:
        return None
    if config.lm.is_dir():
        rule = "be token for a folder, whose model is over tokens"
        check(config.lm_unit == "token", "lm_unit", rule, config.lm_unit)
        device = next(model.parameters()).device
        return load_neural_lm(config.lm, model.vocab_size, tokenizer.eos_id, device)
    if config.lm_unit == "word":
        return WordFusion(load_word_ngrams(config.lm), tokenizer)
    return load_ngrams(config.lm, model.vocab_size, tokenizer.eos_id, tokenizer.pieces())


def load_boost(config: DecodingConfig, model: ASRModel, tokenizer: Tokenizer) -> BoostTree | None:
    if config.boost is None:
        return None
    phrases = read_phrases(config.boost, tokenizer, config.effective_boost_weight)
    return BoostTree(phrases, model.vocab_size, next(model.parameters()).device)
