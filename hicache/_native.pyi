from typing import Any

import numpy.typing as npt

def pack_token_ids(tokens: npt.NDArray[Any], /) -> bytes | None: ...
def copy_rows(
    target: npt.NDArray[Any], target_rows: npt.NDArray[Any], source: npt.NDArray[Any], source_rows: npt.NDArray[Any], /
) -> None: ...
