//! What forks start from: other sandboxes, snapshots, images.

use std::process::Command;

use super::World;

/// Says what it finds, and adds to a file.
const LOOKS: &str = r#"
name = "looks"
[[turn]]
text = "I look."
tools = [{ name = "Bash", input = { command = "{ cat ~/tool /marker; cat a.txt; } > seen.txt 2>/dev/null; echo more >> a.txt" } }]
[[turn]]
text = "Done."
"#;

fn world() -> World {
    let w = World::with_commit();
    w.write(&w.script(), LOOKS);
    w
}

fn inside(w: &World, sandbox: &str, script: &str) -> String {
    let ran = w.run(&["sandbox", "exec", sandbox, "--", "sh", "-c", script]);
    assert_eq!(ran.code, 0, "{script}: {}{}", ran.stdout, ran.stderr);
    ran.stdout
}

/// A file of a fork's result, as the repository has it.
fn file(w: &World, run: &str, fork: u32, path: &str) -> String {
    w.git(&["show", &format!("refs/forkyard/{run}/{fork}:{path}")])
}

#[test]
fn forks_work_in_children_of_sandboxes_that_stay_as_they_are() {
    let w = world();
    for name in ["box1", "box2"] {
        assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", name]).code, 0);
    }
    inside(&w, "box1", "echo a tool > ~/tool");
    inside(
        &w,
        "box2",
        "printf 'one\\nof the sandbox\\n' > a.txt; echo own > own.txt; sleep 1000 >/dev/null 2>&1 &",
    );
    let verify = "tail -n 1 a.txt | grep -q more && test -s seen.txt";
    let run = w.ended(&["--sandbox", "box1", "--sandbox", "box2", "--verify", verify]);
    let status = w.json(&["status", &run, "--json"]);
    assert_eq!(
        (status["total_forks"].as_u64(), status["successful"].as_u64()),
        (Some(2), Some(2)),
        "{status}"
    );
    for n in [0, 1] {
        assert_eq!(status["results"][n]["verified"], true, "{status}");
    }
    // An empty one gets the repository; one with files is gone on from.
    assert_eq!(file(&w, &run, 0, "seen.txt"), "a tool\none");
    assert_eq!(file(&w, &run, 0, "a.txt"), "one\nmore");
    assert_eq!(file(&w, &run, 1, "seen.txt"), "one\nof the sandbox");
    assert_eq!(file(&w, &run, 1, "a.txt"), "one\nof the sandbox\nmore");
    assert_eq!(file(&w, &run, 1, "own.txt"), "own");
    // Both are as they were, and what was made of them is gone.
    assert_eq!(inside(&w, "box1", "ls -A; cat ~/tool"), "a tool\n");
    assert_eq!(inside(&w, "box2", "cat a.txt; ls"), "one\nof the sandbox\na.txt\nown.txt\n");
    let list = w.json(&["--json", "sandbox", "list"]);
    let mut left: Vec<&str> =
        list["sandboxes"].as_array().unwrap().iter().map(|s| s["id"].as_str().unwrap()).collect();
    left.sort_unstable();
    assert_eq!(left, ["box1", "box2"]);
    assert_eq!(w.run(&["sandbox", "rm", "box1", "box2"]).code, 0);
}

#[test]
fn a_sandbox_with_files_of_another_repository_is_refused() {
    let w = world();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box3"]).code, 0);
    inside(&w, "box3", "mkdir src; echo x > src/main.c; echo y > Makefile");
    let ran = w.fork(&["--sandbox", "box3"]);
    assert_eq!(ran.code, 1, "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.contains("sandbox box3 holds other files than "), "{}", ran.stdout);
    let details = "0 of 1 are there; found Makefile, src/main.c; expected a.txt\n";
    assert!(ran.stdout.contains(details), "{}", ran.stdout);
    // One that has nothing but a repository's own folder is no better.
    inside(&w, "box3", "rm -r src Makefile; git init -q");
    let ran = w.fork(&["--sandbox", "box3"]);
    assert!(ran.code == 1 && ran.stdout.contains("found no files; expected a.txt\n"), "{}", ran.stdout);
    // What is ignored counts: it may have been committed all the same.
    inside(&w, "box3", "rm -r .git; echo x > a.txt; echo '*' > .gitignore");
    let ran = w.fork(&["--sandbox", "box3"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    inside(&w, "box3", "rm a.txt .gitignore");
    assert_eq!(w.fork(&["--sandbox", "box3"]).code, 0);
    assert_eq!(w.run(&["sandbox", "rm", "box3"]).code, 0);
}

#[test]
fn forks_start_from_a_snapshot() {
    let w = world();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    inside(&w, "box1", "echo a tool > ~/tool");
    assert_eq!(w.run(&["sandbox", "snapshot", "box1", "--name", "tools"]).code, 0);
    assert_eq!(w.run(&["sandbox", "rm", "box1"]).code, 0);
    assert!(w.run(&["sandbox", "snapshots"]).stdout.contains("tools"));
    let run = w.ended(&["--snapshot", "tools"]);
    assert_eq!(file(&w, &run, 0, "seen.txt"), "a tool\none");
    let ran = w.run(&["sandbox", "snapshots", "--remove", "tools"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, "tools is gone.\n"), "{}", ran.stderr);
    let ran = w.run(&["sandbox", "snapshots", "--remove", "tools"]);
    assert!(ran.code == 2 && ran.stderr.contains("no snapshot tools"), "{}", ran.stderr);
}

/// A system of busybox alone, as `docker save` writes one.
fn image(w: &World) -> String {
    let script = r#"set -e
mkdir -p root/bin root/proc root/sys root/dev root/tmp root/etc 0
cp "$(command -v busybox)" root/bin/busybox
for name in sh cat tar mkdir rm ls sleep; do ln -s busybox root/bin/$name; done
echo of the image > root/marker
tar -C root -cf 0/layer.tar .
sum=$(sha256sum 0/layer.tar | cut -d ' ' -f 1)
echo "{\"config\":{\"Env\":[\"PATH=/bin\"]},\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[\"sha256:$sum\"]}}" > config.json
echo '[{"Config":"config.json","Layers":["0/layer.tar"]}]' > manifest.json
tar -cf image.tar config.json manifest.json 0/layer.tar"#;
    let done = Command::new("sh").args(["-c", script]).current_dir(w.dir.path()).output().unwrap();
    assert!(done.status.success(), "busybox-static is needed: {}", String::from_utf8_lossy(&done.stderr));
    format!("archive:{}/image.tar", w.dir.path().display())
}

#[test]
fn forks_of_a_file_differ_in_image_limits_and_captured_files() {
    let w = world();
    let toml = format!(
        "model = {:?}\nnetwork = \"none\"\nprompt = \"look\"\nverify = \"cat seen.txt\"\n\
         [[fork]]\nname = \"host\"\n\
         [[fork]]\nname = \"image\"\nimage = {:?}\nmemory = \"256MiB\"\ncapture = [\"seen.*\", \"none\"]\n",
        w.model(),
        image(&w)
    );
    w.write(&w.repo().join("swarm.toml"), &toml);
    let ran = w.run(&["run", "swarm.toml", "--json"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    let json: serde_json::Value = serde_json::from_str(ran.stdout.lines().last().unwrap()).unwrap();
    let run = json["run"].as_str().unwrap();
    assert_eq!(json["successful"], 2, "{json}");
    assert_eq!(
        (&json["results"][0]["verified"], &json["results"][1]["verified"]),
        (&true.into(), &true.into())
    );
    assert_eq!(file(&w, run, 0, "seen.txt"), "one");
    assert_eq!(file(&w, run, 1, "seen.txt"), "of the image\none");

    let ran = w.run(&["apply", &format!("{run}/1"), "--captured", "got"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(std::fs::read_to_string(w.repo().join("got/seen.txt")).unwrap(), "of the image\none\n");
    assert_eq!(w.run(&["apply", &format!("{run}/1"), "--captured", "got"]).code, 2, "it is not empty now");
    assert_eq!(w.run(&["apply", &format!("{run}/0"), "--captured", "other"]).code, 2, "it captured nothing");
    assert!(w.run(&["status", &format!("{run}/1")]).stdout.contains("captured   seen.txt"));

    // Files that were captured go with their run, and the image with the snapshots that stand on it.
    let dry = w.json(&["gc", "--older-than", "0s", "--dry-run", "--json"]);
    assert_eq!(
        (dry["freed"]["captured"].as_u64(), dry["freed"]["snapshots"].as_array().unwrap().len()),
        (Some(1), 2)
    );
    let done = w.json(&["gc", "--older-than", "0s", "--json"]);
    assert_eq!(done["freed"]["captured"], 1, "{done}");
    for freed in [&dry["freed"], &done["freed"]] {
        assert_eq!(freed["images"].as_array().unwrap().len(), 1, "{freed}");
        assert!(freed["bytes"].as_u64().unwrap() > 500_000, "{freed}");
    }
    let again = w.json(&["gc", "--older-than", "0s", "--json"]);
    assert_eq!(again["freed"]["bytes"], 0, "{again}");
}

#[test]
fn what_is_not_there_is_said_before_anything_is_stored() {
    let w = world();
    let model = w.model();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    assert_eq!(w.run(&["sandbox", "stop", "box1"]).code, 0);
    for (args, expected) in [
        (&["--sandbox", "nope"][..], "there is no such sandbox"),
        (&["--sandbox", "box1"], "it is not running"),
        (&["--snapshot", "nope"], "there is no such snapshot"),
    ] {
        let mut line = vec!["fork", "-p", "x", "-m", &model];
        line.extend(args);
        let ran = w.run(&line);
        assert_eq!(ran.code, 2, "{args:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{args:?}: {}", ran.stderr);
    }
    assert_eq!(w.json(&["list", "--json"])["runs"].as_array().unwrap().len(), 0);
    assert_eq!(w.run(&["sandbox", "rm", "box1"]).code, 0);
}
