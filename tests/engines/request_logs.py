"""Writes the same requests to standard output as the request loggers of the engines do. For test_request_logs.py.

Runs in its own process, because the engines configure the logging of the whole process. It writes several logs, since
the import of an engine takes most of the time, with the line END after each: `python -m tests.engines.request_logs vllm
text:DEBUG json:DEBUG`.
"""

from __future__ import annotations

import sys

END = b"--- end of the log ---\n"
TEXT = "it's \n, prompt_token_ids: [9], prompt_embeds shape: None.\n\u00e9"
PROMPTS = [list(range(100)), list(range(64)), [*range(64), 1, 2]]
OUTPUT = [7, 8, 9]


def log_vllm(form: str, level: str) -> None:
    """Log prompts with an output, with a stream, and without an output."""
    from vllm.config.logging import LoggingConfig  # noqa: PLC0415
    from vllm.entrypoints.serve.utils.request_logger import RequestLogger  # noqa: PLC0415
    from vllm.logger import configure_logging  # noqa: PLC0415
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415

    configure_logging(LoggingConfig(log_level=level, formatter=form))
    logger = RequestLogger(max_log_len=None)
    for number, prompt in enumerate(PROMPTS):
        logger.log_inputs(f"r{number}", TEXT, prompt, None, SamplingParams(), None)
    logger.log_outputs("r1", TEXT, OUTPUT, "stop")
    for tokens in OUTPUT[:1], OUTPUT[1:]:
        logger.log_outputs("r0", TEXT, tokens, None, is_streaming=True, delta=True)
    logger.log_outputs("r0", TEXT, None, "streaming_complete", is_streaming=True)


def log_sglang(form: str, level: int) -> None:
    """Log prompts of token ids, the last ones in a batch, and prompts of text with and without returned ids."""
    from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415
    from sglang.srt.utils.request_logger import RequestLogger  # noqa: PLC0415

    logger = RequestLogger(log_requests=True, log_requests_level=level, log_requests_format=form,
                           log_requests_target=None)
    out = {"text": TEXT, "output_ids": OUTPUT, "meta_info": {"completion_tokens": len(OUTPUT), "e2e_latency": 0.1}}
    requests = [GenerateReqInput(input_ids=PROMPTS[0]), GenerateReqInput(input_ids=PROMPTS[1:])]
    texts = [GenerateReqInput(text=TEXT), GenerateReqInput(text=TEXT, return_prompt_token_ids=True)]
    for request in requests + texts:
        request.normalize_batch_and_arguments()
        logger.log_received_request(request)
    for request in (requests[0], requests[1][1], texts[0]):
        logger.log_finished_request(request, out)
    logger.log_finished_request(texts[1], {**out, "prompt_token_ids": PROMPTS[0]})


if __name__ == "__main__":
    for log in sys.argv[2:]:
        form, _, level = log.partition(":")
        if sys.argv[1] == "vllm":
            log_vllm(form, level)
        else:
            log_sglang(form, int(level))
        sys.stdout.flush()
        sys.stdout.buffer.write(END)
        sys.stdout.buffer.flush()
