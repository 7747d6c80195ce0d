"""The check of a machine with a GPU, and its benchmarks."""

SOFT_VARIABLE = "KVOFFLOADD_SOFT_GPU"
"""1: tests run on the software driver even where there is a GPU; 0: on a GPU or not at all."""

RESULTS_VARIABLE = "KVOFFLOADD_TEST_RESULTS"
"""Names the file that each result goes to as it comes."""

DAEMON_SAYS = "daemon: "
"""Lines of a part's log that are its daemons' begin so."""
