"""Page identity: token ids, the page keys hashed from them, a prompt's key of the tree, and the namespace of pages."""

from .chain import PAGE_KEY_BYTES, PageChain, common_pages, hash_pages, key_page_bytes, page_keys, split_keys
from .namespace import ELEMENT_ORDERS, EPOCH_MAX, FORMAT_VERSION, Namespace, namespace_seed, require_epoch
from .prompt import BIGRAM_BYTES, RadixKey
from .token_ids import TOKEN_BYTES, TOKEN_ID_MAX, TokenInput, token_bytes

__all__ = [
    "BIGRAM_BYTES", "ELEMENT_ORDERS", "EPOCH_MAX", "FORMAT_VERSION", "PAGE_KEY_BYTES", "TOKEN_BYTES", "TOKEN_ID_MAX",
    "Namespace", "PageChain", "RadixKey", "TokenInput", "common_pages", "hash_pages", "key_page_bytes",
    "namespace_seed", "page_keys", "require_epoch", "split_keys", "token_bytes",
]
