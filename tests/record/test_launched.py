"""What the record says of a launch."""

from importlib.metadata import version

from fleetrun.launch.session import VERSION


def test_the_version_is_that_of_the_package():
    assert version("fleetrun") == VERSION
