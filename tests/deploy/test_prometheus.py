"""Rules, alerts and dashboards: they pass the checks of their programs, and use existing metrics."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hatch_build import project_urls
from hicache.config import load_config
from hicache.daemon.metrics import DAEMON_METRICS, NAMESPACE_METRICS
from hicache.metrics.families import CACHE_METRICS
from hicache.metrics.stores import STORE_METRICS
from tests.prometheus import program

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        [program("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rules(file: str) -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load((PROMETHEUS / file).read_text())["groups"]:
        yield from group["rules"]


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                yield f"{path.stem}: {panel['title']}", panel


@pytest.mark.parametrize("name", ["prometheus.yml", "daemons.yml", "prometheus-tls.yml"])
def test_the_configuration_and_its_rules_pass_promtool(name: str) -> None:
    """The files of secrets in an example do not exist here, so only the syntax is checked."""
    checks = ("check", "config", "--syntax-only") if "tls" in name else ("check", "config")
    found = promtool(*checks, PROMETHEUS / name)
    assert "is valid prometheus config" in found and ("tls" in name or "2 rule files found" in found)


@pytest.mark.parametrize("path", sorted((PROMETHEUS / "tests").iterdir()), ids=lambda path: path.name)
def test_the_rules_pass_their_tests(path: Path) -> None:
    promtool("test", "rules", path)


def test_every_alert_has_a_test_that_detects_an_alert_that_cannot_fire(tmp_path: Path) -> None:
    tests = "".join(path.read_text() for path in (PROMETHEUS / "tests").iterdir())
    assert not [rule["alert"] for rule in rules("alerts.rules.yml") if f'"{rule["alert"]}"' not in tests]
    for name in ("recording.rules.yml", "alerts.rules.yml"):
        text = (PROMETHEUS / name).read_text()
        (tmp_path / name).write_text(text.replace("hicache_backend_overdue_calls", "hicache_backend_overdue"))
    (tmp_path / "tests").mkdir()
    changed = tmp_path / "tests/alerts.test.yml"
    changed.write_text((PROMETHEUS / "tests/alerts.test.yml").read_text())
    with pytest.raises(AssertionError, match="HiCacheCallsHang"):
        promtool("test", "rules", changed)


def test_every_alert_has_a_severity_a_description_and_a_runbook() -> None:
    anchors = {line[3:].strip().lower() for line in (ROOT / "docs/runbooks.md").read_text().splitlines()
               if line.startswith("## ")}
    alerts = list(rules("alerts.rules.yml"))
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert {"summary", "description", "runbook"} == set(alert["annotations"])
        assert alert["annotations"]["runbook"] == f"docs/runbooks.md#{alert['alert'].lower()}"
    assert anchors == {alert["alert"].lower() for alert in alerts}  # and each section is about an existing alert


def linked(folder: Path, *site: str, project: str = "") -> dict[str, str]:
    """Run a copy of the script that writes the links, and return the rule files; `project` is its pyproject.toml."""
    place = folder / "deploy/prometheus"
    place.mkdir(parents=True, exist_ok=True)
    for path in (PROMETHEUS / "links.py", *PROMETHEUS.glob("*.rules.yml")):
        if not (place / path.name).exists():
            (place / path.name).write_text(path.read_text())
    (folder / "pyproject.toml").write_text(project or (ROOT / "pyproject.toml").read_text())
    subprocess.run(["python3", place / "links.py", *site], check=True, timeout=300)
    return {path.name: path.read_text() for path in place.glob("*.rules.yml")}


def test_with_the_address_of_the_documentation_each_alert_links_to_its_runbook(tmp_path: Path) -> None:
    """Another test compares the anchors with the sections of the page, and test_docs_site those of the site."""
    shipped = {path.name: path.read_text() for path in PROMETHEUS.glob("*.rules.yml")}
    assert linked(tmp_path) == shipped, "run deploy/prometheus/links.py"
    project = (ROOT / "pyproject.toml").read_text()
    packaged = project.replace('documentation = ""', 'documentation = "https://docs.maker.test/hicache"')
    for found in (linked(tmp_path, "https://docs.maker.test/hicache/"), linked(tmp_path, project=packaged)):
        alerts = [rule for group in yaml.safe_load(found["alerts.rules.yml"])["groups"] for rule in group["rules"]]
        for alert in alerts:
            site = "https://docs.maker.test/hicache/runbooks.html"
            assert alert["annotations"]["runbook_url"] == f"{site}#{alert['alert'].lower()}"
            assert "runbook" not in alert["annotations"]
        promtool("check", "rules", tmp_path / "deploy/prometheus/alerts.rules.yml")
    assert linked(tmp_path, "") == shipped, "the links can be removed again"


def test_the_package_has_no_link_without_an_address() -> None:
    addresses = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    assert not [url for url in project_urls(addresses).values() if ".example" in url]
    assert project_urls({"documentation": "", "source": "", "issues": ""}) == {}
    assert project_urls({"documentation": "https://d.test/", "source": "", "issues": "https://i.test"}) == {
        "Homepage": "https://d.test", "Documentation": "https://d.test",
        "Changelog": "https://d.test/CHANGELOG.html", "Issues": "https://i.test",
    }


def test_prometheus_scrapes_the_addresses_of_the_ready_configurations() -> None:
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    metrics = load_config(ROOT / "configs/single-node-file.yaml", environ={}, overrides={}).metrics
    daemon = load_config(ROOT / "configs/daemon.yaml", environ={}, overrides={}).daemon
    assert targets == {"hicache": [f"{metrics.host}:{metrics.port}"], "hicache-daemon": [daemon.listen]}
    (relabel,) = jobs[0]["metric_relabel_configs"]
    assert re.fullmatch(relabel["regex"], "hicache_backend_get_pages_total")


def test_a_node_with_daemons_only_has_no_target_for_an_engine() -> None:
    both, alone = (yaml.safe_load((PROMETHEUS / name).read_text()) for name in ("prometheus.yml", "daemons.yml"))
    assert alone["scrape_configs"] == [job for job in both["scrape_configs"] if job["job_name"] == "hicache-daemon"]
    assert {**both, "scrape_configs": 0} == {**alone, "scrape_configs": 0}


def test_the_dashboards_match_their_generator(tmp_path: Path) -> None:
    script = tmp_path / "build.py"
    script.write_text((ROOT / "deploy/grafana/build.py").read_text())
    (tmp_path / "dashboards").mkdir()
    subprocess.run(["python3", str(script)], check=True, timeout=300)
    made = {path.name: path.read_text() for path in (tmp_path / "dashboards").iterdir()}
    assert made == {path.name: path.read_text() for path in DASHBOARDS}


def test_every_panel_has_a_place_a_unit_a_description_and_the_selected_data_source() -> None:
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "instance"}
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not cells & taken and place["x"] + place["w"] <= 24
            taken |= cells
            if panel["type"] == "row":
                continue
            assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
            assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_every_panel_and_rule_uses_existing_metrics() -> None:
    tables = (CACHE_METRICS, STORE_METRICS, DAEMON_METRICS, NAMESPACE_METRICS)
    known = {f"hicache_{spec.name}" for table in tables for spec in table}
    known |= {f"{name}_{end}" for name in known if name.endswith("_seconds") for end in ("bucket", "count", "sum")}
    texts = {name: [target["expr"] for target in panel["targets"]] for name, panel in panels()}
    recorded = set()
    for file in ("recording.rules.yml", "alerts.rules.yml"):
        for rule in rules(file):
            texts[rule.get("alert") or rule["record"]] = [rule["expr"]]
            recorded.add(rule.get("record"))
    for name, expressions in texts.items():
        for expression in expressions:
            found = set(re.findall(r"(?<![\w:])hicache_\w+", expression))
            assert found <= known, f"{name}: {found - known}"
            assert set(re.findall(r"\w+:hicache_\w+:\w+", expression)) <= recorded, name
