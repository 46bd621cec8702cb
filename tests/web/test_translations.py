"""Every text of the pages is there in each language, with the same parts to fill in."""

import re
import string

from posttrain.web.translations import LANGUAGES, TEXTS


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_languages_have_the_same_texts() -> None:
    assert set(TEXTS) == set(LANGUAGES)
    for language in LANGUAGES:
        assert TEXTS[language].keys() == TEXTS["en"].keys()
        assert all(TEXTS[language].values())
        for key, text in TEXTS[language].items():
            assert fields(text) == fields(TEXTS["en"][key]), (language, key)


def test_chinese_texts_have_chinese_punctuation() -> None:
    for key, text in TEXTS["zh"].items():
        assert not re.search(r"[\u3400-\u9fff][,:;?!(]|[,:;?!)][\u3400-\u9fff]", text), (key, text)
