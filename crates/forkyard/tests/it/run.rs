use super::World;

#[test]
fn a_file_in_toml_or_yaml_is_a_run_with_forks_that_differ() {
    let w = World::with_commit();
    let toml = format!(
        "repo = \".\"\nmodel = {:?}\nnetwork = \"none\"\nmax_concurrent = 2\nverify = \"grep -q zero a.txt\"\n\
         [[fork]]\nname = \"first\"\nprompt = \"one\"\n[[fork]]\nname = \"second\"\nprompt = \"two\"\nmemory = \"512MiB\"\n",
        w.model()
    );
    w.write(&w.repo().join("swarm.toml"), &toml);
    let yaml = format!(
        "model: {:?}\nnetwork: none\nprompt: all\nfork:\n  - name: first\n  - name: second\n    capture: [a.txt]\n",
        w.model()
    );
    w.write(&w.repo().join("swarm.yaml"), &yaml);
    for file in ["swarm.toml", "swarm.yaml"] {
        let ran = w.run(&["run", file, "--json"]);
        assert_eq!(ran.code, 0, "{file}: {}{}", ran.stdout, ran.stderr);
        let json: serde_json::Value = serde_json::from_str(ran.stdout.lines().last().unwrap()).unwrap();
        let names: Vec<&str> =
            json["results"].as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["first", "second"], "{file}");
    }
}

/// Prompts and models may be one or several, as on the command line.
#[test]
fn every_prompt_of_a_file_meets_every_model() {
    let w = World::with_commit();
    let other = w.repo().parent().unwrap().join("other.toml");
    w.write(&other, super::SCRIPT);
    let text = format!(
        "prompt = [\"a\", \"b\"]\nmodel = [{:?}, \"script:{}\"]\nnetwork = \"none\"\neffort = \"low\"\nin_sandbox = false\n",
        w.model(),
        other.display()
    );
    w.write(&w.repo().join("grid.toml"), &text);
    let ran = w.run(&["run", "grid.toml", "--json"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    let json: serde_json::Value = serde_json::from_str(ran.stdout.lines().last().unwrap()).unwrap();
    let models: Vec<bool> = json["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["model"].as_str().unwrap().ends_with("other.toml"))
        .collect();
    assert_eq!(models, [false, false, true, true], "{json}");
}

#[test]
fn what_is_wrong_with_a_file_is_said() {
    let w = World::with_commit();
    for (name, text, expected) in [
        ("a.toml", "prompt = 1", "a.toml"),
        ("g.toml", "prompt = 1", "a text or a list of texts"),
        ("b.toml", "nonsense = 1\nprompt = \"x\"", "nonsense"),
        ("c.yaml", "prompt: [", "c.yaml"),
        ("d.toml", "model = \"x\"", "has no prompt"),
        ("e.toml", "forks = 2\nprompt = \"x\"\n[[fork]]\n", "contradict"),
        ("f.toml", "prompt = \"x\"\n[[fork]]\nmemory = \"lots\"\n", "fork[0].memory"),
    ] {
        w.write(&w.repo().join(name), text);
        let ran = w.run(&["run", name]);
        assert_eq!(ran.code, 2, "{name}: {}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{name}: {}", ran.stderr);
    }
    assert_eq!(w.run(&["run", "none.toml"]).code, 2);
}
