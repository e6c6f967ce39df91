import sys

from benchmark import throughput

# scripts that train nothing: 10 s for the first iteration of 100 steps, then 2 s for each
OURS = """
open("metrics.csv", "w").write("global_step,wall_time\\n100,10\\n200,12\\n300,14\\n")
"""
OTHER = """
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter("runs/one") as writer:
    for step, time in (100, 10), (200, 12), (300, 14):
        writer.add_scalar("charts/SPS", 1, step, 1e9 + time)
"""


def test_the_first_iteration_does_not_count_and_the_others_go_on_after_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scripts = {"ours.py": OURS, "broken.py": "import sys; sys.exit(f'cannot take {sys.argv[1:]}')", "other.py": OTHER}
    for name, source in scripts.items():
        (tmp_path / name).write_text(source)
    throughput.main([f"{sys.executable} {name} --num-envs 2" for name in scripts])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["50.0", "steps/s"] and lines[-1].split()[:2] == ["50.0", "steps/s"]
    assert "cannot take ['--total-timesteps', '98304', '--num-envs', '2']" in lines
