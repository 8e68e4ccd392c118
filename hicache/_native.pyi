from typing import Any

import numpy.typing as npt

def pack_token_ids(tokens: npt.NDArray[Any], /) -> bytes | None: ...
