"""Whether a cold device can be used, judged by what became of its requests."""

import logging
from typing import Final

import trio

from ctxfs.errors import DeviceError, DeviceLost

_FAILURES_IN_ROW_MAX: Final = 3
_BACKOFF_SECONDS: Final = 1.0
_BACKOFF_SECONDS_MAX: Final = 30.0

_logger = logging.getLogger(__name__)


class Health:
    """Takes down writes that fail, and a device that is gone.

    After several failed writes in a row, puts are refused for a while; the next one after that is
    the trial. Reads are always tried, unless the device is gone, which is for ever.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.lost = False
        self.errors = 0
        self._in_row = 0
        self._backoff_seconds = _BACKOFF_SECONDS
        self._retry_at = 0.0  # on trio's clock

    @property
    def state(self) -> str:
        """ "ok", "failing" or "lost"."""
        if self.lost:
            return "lost"
        return "failing" if self._in_row >= _FAILURES_IN_ROW_MAX else "ok"

    @property
    def is_writable(self) -> bool:
        """Whether a put would be tried now."""
        return not self.lost and not self._is_left_alone()

    def _is_left_alone(self) -> bool:
        return self.state == "failing" and trio.current_time() < self._retry_at

    def check_present(self) -> None:
        """Raise DeviceLost where the device is gone."""
        if self.lost:
            raise DeviceLost(f"{self._path} is gone")

    def check_writable(self) -> None:
        """Raise DeviceLost where the device is gone, DeviceError while it is left alone."""
        self.check_present()
        if self._is_left_alone():
            raise DeviceError(f"{self._path} fails to write; it is tried again later")

    def note_success(self) -> None:
        """A write went well."""
        if self.state == "failing":
            _logger.warning("%s: writes work again", self._path)
        self._in_row = 0
        self._backoff_seconds = _BACKOFF_SECONDS

    def note_failure(self, error: DeviceError) -> None:
        """A write or a flush failed."""
        self.note_trouble(error)
        if self.lost:
            return
        self._in_row += 1
        if self._in_row >= _FAILURES_IN_ROW_MAX:
            self._retry_at = trio.current_time() + self._backoff_seconds
            _logger.warning(
                "%s: writes fail; no blocks go there for %g s", self._path, self._backoff_seconds
            )
            self._backoff_seconds = min(2 * self._backoff_seconds, _BACKOFF_SECONDS_MAX)

    def note_trouble(self, error: DeviceError) -> None:
        """Any request failed; a failed read says nothing about writes."""
        self.errors += 1
        if isinstance(error, DeviceLost):
            if not self.lost:
                _logger.error("%s: the device is gone: %s", self._path, error)
            self.lost = True
        else:
            _logger.warning("%s: %s", self._path, error)
