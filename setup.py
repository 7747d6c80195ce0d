"""Names the wheel after what is in it. Everything else about the package stands in pyproject.toml.

The C helper is optional. Where it could not be compiled, the wheel has nothing but Python and fits every machine, but
setuptools would name it after the one that built it.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class NamedByContent(bdist_wheel):
    """Marks a wheel without a compiled module as one of pure Python."""

    def get_tag(self) -> tuple[str, str, str]:
        content = Path(self.bdist_dir)
        if content.is_dir():  # not for an editable installation, which builds in place
            self.root_is_pure = not any(content.rglob("*.so"))
        return super().get_tag()


setup(cmdclass={"bdist_wheel": NamedByContent})
