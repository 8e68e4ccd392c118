"""HiCache in other engines: vLLM and SGLang load a class from here by its name in their flags.

Importing this package does not import an engine. Modules that need one are loaded by that engine, or by a test.
"""
