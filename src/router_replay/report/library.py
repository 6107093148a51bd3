"""The plotting library of the page: Vega, whose JavaScript ships inside the package vl-convert-python."""

from __future__ import annotations

import functools

from router_replay.errors import ConfigError


def check_library() -> None:
    """Raise ConfigError with the install command if the library is missing; call it before a long run."""
    try:
        import vl_convert  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError('the page needs vl-convert-python: pip install "router-replay[report]"') from error


@functools.cache
def library_script() -> str:
    """Return Vega as the text of one script, which sets `window.vegaEmbed`; the first call takes about a second."""
    check_library()
    import vl_convert

    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return script.replace("</script", "<\\/script")
