"""What codec `zstd` writes and reads with: level and dictionaries, as the settings say."""

import logging

from ..tiers.codecs.dictionaries import DictionaryError, read_dictionaries
from ..tiers.codecs.general import Zstd
from ..tiers.codecs.records import RecordCodecs
from .config import CompressionSettings
from .errors import StartError

log = logging.getLogger(__name__)


def read_zstd(settings: CompressionSettings) -> Zstd:
    """Return the codec with the dictionaries of the directory. Raises StartError, naming what to change."""
    try:
        found = read_dictionaries(settings.dictionaries)
    except (DictionaryError, OSError) as problem:
        raise StartError(f"compression.dictionaries: {problem}; repair the file or take it away") from problem
    name = settings.zstd_dictionary
    if name and name not in found:
        known = ", ".join(found) or "none"
        raise StartError(
            f"compression.zstd_dictionary: there is no {name!r} in compression.dictionaries ({known})"
        )
    by_id = {dictionary.dict_id(): dictionary for dictionary in found.values()}
    return Zstd(settings.zstd_level, dictionary=found.get(name), dictionaries=by_id)


def adopt_zstd_again(codecs: RecordCodecs, settings: CompressionSettings) -> None:
    """Look again at which dictionaries there are; what was known stays in force when they cannot be read."""
    try:
        codecs.adopt_zstd(read_zstd(settings))
    except StartError as problem:
        log.error("dictionaries stay as they were: %s", problem)
