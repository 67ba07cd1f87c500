"""NVMe commands keep what all engines promise: their tests, on drives of every kind."""

from tests.device.test_engines import (
    test_many_tasks_at_once_get_their_own_bytes,
    test_memory_of_a_cancelled_request_is_left_alone,
    test_more_sources_than_one_call_takes_are_written,
    test_no_bytes_are_no_work,
    test_reads_land_in_the_mapping_of_a_tmpfs_file,
    test_requests_beyond_the_end_are_refused,
    test_several_sources_are_written_end_to_end,
    test_unaligned_requests_are_refused,
    test_what_was_written_is_read,
)

__all__ = [
    "test_many_tasks_at_once_get_their_own_bytes",
    "test_memory_of_a_cancelled_request_is_left_alone",
    "test_more_sources_than_one_call_takes_are_written",
    "test_no_bytes_are_no_work",
    "test_reads_land_in_the_mapping_of_a_tmpfs_file",
    "test_requests_beyond_the_end_are_refused",
    "test_several_sources_are_written_end_to_end",
    "test_unaligned_requests_are_refused",
    "test_what_was_written_is_read",
]
