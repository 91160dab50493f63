"""Names of languages: codes of ISO 639-1, and what else people write for them."""

import re
from collections.abc import Collection
from difflib import get_close_matches
from functools import lru_cache

AUTO = "auto"
"""In place of a language: that which is heard."""

# A code, its codes of ISO 639-2 and 639-3 and older ones, that of a country where it is no other
# language's, and its names, English and its own.
_TABLE = """
af afr afrikaans; am amh amharic; ar ara arb arabic العربية; as asm assamese; ast asturian; az
aze azj azerbaijani; ba bak bashkir; be bel belarusian; bg bul bulgarian български; bn ben
bengali bangla; bo bod tib tibetan; br bre breton; bs bos bosnian; ca cat catalan valencian
català; ceb cebuano; ckb sorani; cs ces cze cz czech čeština; cv chv chuvash; cy cym wel welsh; da
dan dk danish dansk; de deu ger german deutsch; dv div dhivehi; el ell gre gr greek ελληνικά; en eng
english; eo epo esperanto; es spa spanish castilian español; et est ekk estonian eesti; eu eus
baq basque; fa fas per pes persian farsi فارسی; ff ful fulah; fi fin finnish suomi; fo fao
faroese; fr fra fre french français; fy fry frisian; ga gle irish; gd gla scottish-gaelic; gl
glg galician; gn grn guarani; gu guj gujarati; ha hau hausa; haw hawaiian; he heb iw hebrew
עברית; hi hin hindi हिन्दी; hr hrv croatian hrvatski; ht hat haitian haitian-creole; hu hun
hungarian magyar; hy hye arm armenian; ia ina interlingua; id ind in indonesian
bahasa-indonesia; ig ibo igbo; is isl ice icelandic; it ita italian italiano; ja jpn jp japanese
日本語; jv jav jw javanese; ka kat geo georgian; kab kabyle; kk kaz kazakh; km khm khmer; kn kan
kannada; ko kor korean 한국어; ku kur kmr kurdish; ky kir kyrgyz; la lat latin; lb ltz
luxembourgish; lg lug luganda; ln lin lingala; lo lao lao; lt lit lithuanian lietuvių; lv lav
lvs latvian latviešu; mg mlg malagasy; mi mri mao maori; mk mkd mac macedonian; ml mal
malayalam; mn mon khk mongolian; mr mar marathi; ms msa may zsm malay; mt mlt maltese; my mya
bur burmese myanmar; ne nep npi nepali; nl nld dut dutch flemish nederlands; nn nno nynorsk; no
nor nb nob norwegian bokmål norsk; ny nya chichewa; oc oci occitan; om orm oromo; or ori ory
odia oriya; pa pan punjabi panjabi; pl pol polish polski; ps pus pbt pashto pushto; pt por
portuguese português; rm roh romansh; ro ron rum mo romanian moldovan română; ru rus russian
русский; rw kin kinyarwanda; sa san sanskrit; sd snd sindhi; si sin sinhala sinhalese; sk slk
slo slovak slovenčina; sl slv slovenian slovene; sn sna shona; so som somali; sq sqi alb als
albanian shqip; sr srp serbian српски; su sun sundanese; sv swe swedish svenska; sw swa swh
swahili; ta tam tamil; te tel telugu; tg tgk tajik; th tha thai ไทย; ti tir tigrinya; tk tuk
turkmen; tl tgl fil tagalog filipino; tr tur turkish türkçe; tt tat tatar; ug uig uyghur; uk
ukr ua ukrainian українська; ur urd urdu; uz uzb uzn uzbek; vi vie vn vietnamese tiếng-việt; wo wol
wolof; xh xho xhosa; yi yid ydd yiddish; yo yor yoruba; yue cantonese zh-yue 粵語; zh zho chi cn cmn
chinese mandarin 中文; zu zul zulu
"""
_CODES = {name: entry.split()[0] for entry in _TABLE.split(";") for name in entry.split()}
# A tag such as pt-BR, zh-Hant-TW or de_DE.UTF-8: the speech of a region is of the same language.
_TAG = re.compile(r"([a-z]{2,3})(-[a-z]{4})?(-([a-z]{2}|\d{3}))?([.@].*)?")


class UnknownLanguageError(ValueError):
    """No such language, or none of a tokenizer."""


@lru_cache(maxsize=4096)
def language_code(name: str) -> str:
    """Return the code of a language: EN, en-US, en_us, eng and English are all en.

    A code of two or three letters that the table lacks is taken as it is, and so is a name of one's
    own that begins with ``x-``.
    """
    text = re.sub(r"[\s_]+", "-", re.sub(r"\(.*\)", "", name).strip().lower())
    text = text.removeprefix("<|").removesuffix("|>")
    if text in _CODES:
        return _CODES[text]
    if text == AUTO or text.startswith("x-"):
        return text
    if (tag := _TAG.fullmatch(text)) is not None:
        return _CODES.get(tag[1], tag[1])
    codes = sorted(set(_CODES.values()))
    raise UnknownLanguageError(
        f"`language` must be a code or an English name, but is {name[:60]!r}"
        f"{_nearest(text, _CODES)}: known are {', '.join(codes)}, other codes of two or three "
        "letters, and any name that begins with x-."
    )


def language_among(name: str, known: Collection[str], subject: str) -> str:
    """Return which of these languages is meant, by its name among them."""
    if name in known:
        return name
    names = {code_or_name(other): other for other in reversed([*known])}
    wanted = code_or_name(name)
    if wanted in names:
        return names[wanted]
    raise UnknownLanguageError(
        f"the language of the {subject} must be one of {', '.join(known)}, but is {name!r}"
        f"{_nearest(name, known)}: name one of these, train a tokenizer with that language, or let "
        f"`effasr prepare --language-map {name}=NEAR` name a near language for it."
    )


def code_or_name(name: str) -> str:
    """Return the code of a language, or a name that is none's as it is."""
    try:
        return language_code(name)
    except UnknownLanguageError:
        return name


def _nearest(name: str, known: Collection[str]) -> str:
    names = [other for other in known if len(other) > 3]  # codes resemble each other by chance
    nearest = get_close_matches(name, names, 1, cutoff=0.75)
    return f", perhaps {nearest[0]!r}" if nearest else ""
