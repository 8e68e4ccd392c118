from typing import Any

import numpy.typing as npt

def narrow(tokens: npt.NDArray[Any], /) -> bytes | None: ...
