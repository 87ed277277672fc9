"""Which errors of a write are the device's."""

import errno

import pytest

from tidelog.model.errors import DamagedLogError, StorageError
from tidelog.world.storage_errors import is_device_error, storage_error


def failed(number: int) -> StorageError:
    try:
        try:
            raise OSError(number, "a test says so")
        except OSError as error:
            raise storage_error("append", "x", error) from error
    except StorageError as error:
        return error


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENODEV, errno.ESTALE])
def test_a_device_that_fails_is_one(number: int) -> None:
    assert is_device_error(failed(number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_want_of_room_of_files_or_of_memory_is_none(number: int) -> None:
    assert not is_device_error(failed(number))


def test_a_log_that_is_damaged_says_nothing_of_its_device() -> None:
    assert not is_device_error(DamagedLogError("rot", path="x", good_end=3))
