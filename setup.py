"""Builds from nothing but the sources, and names the wheel after what is in it. Everything else about the package
stands in pyproject.toml.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build


class BuiltAnew(build):
    """Removes what an earlier version has left in a checkout; setuptools would install its modules, too."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class NamedByContent(bdist_wheel):
    """Marks a wheel without a compiled module as one of pure Python, for every machine. The C helper is optional, but
    setuptools would name the wheel after the machine that could not compile it.
    """

    def get_tag(self) -> tuple[str, str, str]:
        content = Path(self.bdist_dir)
        if content.is_dir():  # not for an editable installation, which builds in place
            self.root_is_pure = not any(content.rglob("*.so"))
        return super().get_tag()


setup(cmdclass={"build": BuiltAnew, "bdist_wheel": NamedByContent})
