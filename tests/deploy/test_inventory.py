"""Every file in deploy/ and configs/ is used by a test. A table names the test."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

READY = "tests.test_ready_configs"
# A file or a folder, and the test that uses it. For a file, the entry with the longest matching name counts.
EXERCISED_BY = {
    "configs/daemon.yaml": "tests.deploy.test_daemon:test_the_ready_configuration_works",
    "configs/demo.yaml": f"{READY}:test_a_file_with_directories_carries_pages",
    "configs/encrypted-file.yaml": f"{READY}:test_the_file_with_encrypted_pages",
    "configs/file-over-mooncake.yaml": f"{READY}:test_a_file_with_a_server_carries_pages",
    "configs/file-over-shared-files.yaml": f"{READY}:test_a_file_with_directories_carries_pages",
    "configs/file-over-redis.yaml": f"{READY}:test_a_file_with_a_server_carries_pages",
    "configs/levels.yaml": f"{READY}:test_a_file_with_a_server_carries_pages",
    "configs/memory-over-file.yaml": f"{READY}:test_a_file_with_directories_carries_pages",
    "configs/mooncake.yaml": f"{READY}:test_a_file_with_a_server_carries_pages",
    "configs/redis-cluster.yaml": f"{READY}:test_a_file_with_a_server_carries_pages",
    "configs/redis-sentinel.yaml": f"{READY}:test_a_file_with_a_server_carries_pages",
    "configs/redis.yaml": f"{READY}:test_a_file_with_a_server_carries_pages",
    "configs/remote.yaml": f"{READY}:test_a_file_with_a_server_carries_pages",
    "configs/replay.yaml": f"{READY}:test_a_file_with_directories_carries_pages",
    "configs/s3-compatible.yaml": f"{READY}:test_a_file_with_a_server_carries_pages",
    "configs/s3.yaml": f"{READY}:test_a_file_with_a_server_carries_pages",
    "configs/sharded-file.yaml": f"{READY}:test_a_file_with_directories_carries_pages",
    "configs/single-node-file.yaml": f"{READY}:test_a_file_with_directories_carries_pages",
    "configs/sglang.yaml": f"{READY}:test_a_file_with_directories_carries_pages",
    "configs/sglang-tree.yaml": f"{READY}:test_a_file_with_directories_carries_pages",
    "configs/shared-files.yaml": f"{READY}:test_a_file_with_directories_carries_pages",
    "configs/two-level-file.yaml": f"{READY}:test_a_file_with_directories_carries_pages",
    "configs/vllm.yaml": f"{READY}:test_a_file_with_directories_carries_pages",
    "deploy/compose/compose.yaml": "tests.deploy.test_compose:test_the_file_passes_its_schema_and_a_wrong_one_does_not",
    "deploy/compose/config/engine.yaml": "tests.deploy.test_contained:test_the_daemon_of_compose_has_storage",
    "deploy/compose/config/file.yaml": "tests.deploy.test_contained:test_the_daemon_of_compose_has_storage",
    "deploy/compose/config/mooncake.yaml": "tests.deploy.test_compose:test_the_daemon_works_in_a_mooncake_store",
    "deploy/compose/config/s3.yaml": "tests.deploy.test_compose:test_the_daemon_works_over_a_bucket",
    "deploy/compose/config/valkey.yaml": "tests.deploy.test_compose:test_the_daemon_works_over_valkey",
    "deploy/compose/prometheus.yml": "tests.deploy.test_compose:test_promtool_accepts_prometheus_yml_and_its_rules",
    "deploy/docker/Dockerfile": "tests.deploy.test_docker:test_the_linter_accepts_the_dockerfile_and_not_a_wrong_one",
    "deploy/kubernetes/kustomization.yaml": "tests.deploy.test_kubernetes:test_kustomize_renders_all_files",
    "deploy/kubernetes/daemon.yaml": "tests.deploy.test_kubernetes:test_the_daemon_serves_an_engine_with_the_files",
    "deploy/kubernetes/": "tests.deploy.test_kubernetes:test_each_resource_passes_the_schemas",
    "deploy/grafana/build.py": "tests.deploy.test_prometheus:test_the_dashboards_match_their_generator",
    "deploy/grafana/dashboards/": "tests.deploy.test_prometheus:test_every_panel_and_rule_uses_existing_metrics",
    "deploy/grafana/provisioning/": "tests.deploy.test_compose:test_grafana_finds_prometheus_and_the_dashboards",
    "deploy/prometheus/": "tests.deploy.test_prometheus:test_the_configuration_and_its_rules_pass_promtool",
    "deploy/prometheus/links.py":
        "tests.deploy.test_prometheus:test_with_the_address_of_the_documentation_each_alert_links_to_its_runbook",
    "deploy/prometheus/prometheus-tls.yml":
        "tests.deploy.test_scrape_tls:test_the_example_scrapes_a_daemon_and_an_engine_and_follows_a_replaced_token",
    "deploy/prometheus/tests/": "tests.deploy.test_prometheus:test_the_rules_pass_their_tests",
    "deploy/systemd/hicache.service": "tests.deploy.test_systemd:test_systemd_accepts_the_unit",
    "deploy/systemd/user/hicache.service": "tests.deploy.test_systemd:test_systemd_accepts_the_unit",
}


def files(repository: Path) -> Iterator[str]:
    """Yield the files of both folders."""
    for folder in ("configs", "deploy"):
        for path in sorted((repository / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(repository).as_posix()


def entry_of(file: str) -> str | None:
    """Return the name of the entry for a file; None without one."""
    matching = [name for name in EXERCISED_BY if file == name or (name.endswith("/") and file.startswith(name))]
    return max(matching, key=len, default=None)


def test_each_file_has_an_entry_and_each_entry_a_file(repository: Path) -> None:
    used = {file: entry_of(file) for file in files(repository)}
    assert not [file for file, entry in used.items() if entry is None], "the table has no test for these files"
    assert set(used.values()) == set(EXERCISED_BY), "the table has entries without a file"
    assert entry_of("deploy/unknown.yaml") is None and entry_of("configs/unknown.yaml") is None


@pytest.mark.parametrize("test", sorted(set(EXERCISED_BY.values())))
def test_the_tests_of_the_table_exist(test: str) -> None:
    module, _, name = test.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
