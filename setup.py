"""Builds the native host kernel with the package; all else is in pyproject.toml.

The kernel is a shared library without Python or torch headers, so it needs g++ and nothing else. A
machine without a compiler gets the package without it: updates then take the slow path, and say so.
"""

import subprocess
import warnings
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

FOLDER = Path(__file__).parent / "l2l" / "parameter_server"


class BuildWithKernel(build_py):
    """Compile the kernel beside its source, then collect files as usual."""

    def run(self) -> None:
        """Build."""
        try:
            subprocess.run(["sh", str(FOLDER / "build_kernel.sh")], check=True)
        except (OSError, subprocess.CalledProcessError) as failure:
            warnings.warn(f"the native host kernel was not built: {failure}", stacklevel=1)
        super().run()


class PlatformDistribution(Distribution):
    """A wheel with a shared library in it is not for every platform."""

    def has_ext_modules(self) -> bool:
        """Always."""
        return True


setup(cmdclass={"build_py": BuildWithKernel}, distclass=PlatformDistribution)
