//! Sandboxes as they are made: children like their parents, names that mean one thing, snapshots that travel.

use super::World;

#[test]
fn children_are_like_their_parent() {
    let w = World::new();
    let host = w.dir.path().join("host");
    w.write(&host.join("a.txt"), "of the host\n");
    let volume = format!("{}:/mnt/host", host.display());
    let made = w.run(&[
        "sandbox",
        "create",
        "--name",
        "box1",
        "--network",
        "none",
        "--env",
        "GREETING=hello",
        "--volume",
        &volume,
        "--label",
        "team=blue",
        "--memory",
        "300MiB",
    ]);
    assert_eq!(made.code, 0, "{}", made.stderr);
    let ran = w.run(&["sandbox", "fork", "box1"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let child = ran.stdout.trim();
    let script = "cat /mnt/host/a.txt; echo $GREETING; env | grep -ci proxy; ls /sys/class/net; \
                  (exec 3<>/dev/tcp/127.0.0.1/3128) 2>/dev/null && echo reached; true";
    let inside = |id: &str| w.run(&["sandbox", "exec", id, "--", "bash", "-c", script]).stdout;
    assert_eq!(inside(child), inside("box1"));
    let said = inside(child);
    assert!(said.starts_with("of the host\nhello\n0\n") && !said.contains("reached"), "{said}");
    let ran = w.run(&["sandbox", "list", "--label", "team=blue"]);
    assert!(ran.stdout.contains(child) && ran.stdout.contains("box1"), "{}", ran.stdout);
    assert!(ran.stdout.contains("Provider") && ran.stdout.contains("local"), "{}", ran.stdout);
    let ran = w.run(&["sandbox", "list", "--label", "team=red"]);
    assert_eq!(ran.stdout, "There is no such sandbox.\n");
    let ran = w.run(&["sandbox", "list", "--provider", "docker", "--json"]);
    assert!(!ran.stdout.contains("box1"), "{}", ran.stdout);
    let all = w.json(&["--json", "sandbox", "stats"]);
    let limits = all["sandboxes"].as_array().unwrap().iter().map(|s| s["limits"]["memory_bytes"].as_u64());
    assert_eq!(limits.collect::<Vec<_>>(), [Some(300 << 20); 2]);
    assert_eq!(w.run(&["sandbox", "health"]).stdout.lines().count(), 2);
}

#[test]
fn children_have_the_limits_that_are_said() {
    let w = World::new();
    let made =
        ["sandbox", "create", "--name", "box1", "--network", "none", "--memory", "300MiB", "--cpus", "1"];
    assert_eq!(w.run(&made).code, 0);
    let ran =
        w.run(&["sandbox", "fork", "box1", "--memory", "200MiB", "--processes", "64", "--disk", "100MiB"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let limits = w.json(&["--json", "sandbox", "stats", ran.stdout.trim()])["limits"].clone();
    let of = |name: &str| limits[name].as_f64().unwrap();
    assert_eq!(
        (of("memory_bytes"), of("disk_bytes")),
        (f64::from(200 << 20), f64::from(100 << 20)),
        "{limits}"
    );
    assert_eq!((of("processes"), of("cpus")), (64.0, 1.0), "{limits}");
    let ran = w.run(&["sandbox", "fork", "box1", "--memory", "lots"]);
    assert!(ran.code == 2 && ran.stderr.contains("--memory \"lots\""), "{}", ran.stderr);
    // A child that can't be leaves nothing between.
    let ran = w.run(&["sandbox", "fork", "box1", "--memory", "1KiB"]);
    assert!(ran.code == 2 && ran.stderr.contains("hint: "), "{}", ran.stderr);
    assert_eq!(w.json(&["--json", "sandbox", "snapshots"])["snapshots"].as_array().unwrap().len(), 0);
    assert_eq!(w.json(&["--json", "sandbox", "list"])["sandboxes"].as_array().unwrap().len(), 2);
}

#[test]
fn a_command_that_does_not_begin_ends_as_in_a_shell() {
    let w = World::new();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    assert_eq!(w.run(&["sandbox", "exec", "box1", "--", "touch", "plain"]).code, 0);
    for (command, code) in
        [("no-such-program", 127), ("/workspace/none", 127), ("/workspace/plain", 126), ("/etc", 126)]
    {
        let ran = w.run(&["sandbox", "exec", "box1", "--", command]);
        assert_eq!(ran.code, code, "{command}: {}", ran.stderr);
        assert!(ran.stderr.contains("hint: "), "{command}: {}", ran.stderr);
        let json = w.json(&["--json", "sandbox", "exec", "box1", "--", command]);
        assert_eq!(json["exit_code"], code, "{command}: {json}");
    }
    let ran = w.run(&["sandbox", "run", "--network", "none", "--", "no-such-program"]);
    assert_eq!(ran.code, 127, "{}", ran.stderr);
    // That is no word about the command.
    assert_eq!(w.run(&["sandbox", "exec", "none", "--", "true"]).code, 2);
    assert_eq!(w.run(&["sandbox", "exec", "--cwd", "/none", "box1", "true"]).code, 2);
    let ran = w.run(&["sandbox", "run", "--network", "none", "--cwd", "/usr/bin", "--", "pwd"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, "/usr/bin\n"), "{}", ran.stderr);
}

#[test]
fn a_name_means_one_thing() {
    let w = World::new();
    let create = ["sandbox", "create", "--network", "none", "--name", "box1"];
    assert_eq!(w.run(&create).code, 0);
    let ran = w.run(&create);
    assert_eq!((ran.code, ran.stdout.as_str()), (2, ""));
    assert!(
        ran.stderr.contains("sandbox box1 already") && ran.stderr.contains("sandbox rm box1"),
        "{}",
        ran.stderr
    );
    let snapshot = ["sandbox", "snapshot", "box1", "--name", "dup"];
    assert_eq!(w.run(&snapshot).code, 0);
    let ran = w.run(&snapshot);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("snapshot dup already"), "{}", ran.stderr);
    // Docker has one of that name on record.
    std::fs::create_dir_all(w.home().join("docker/sandboxes/box2")).unwrap();
    let ran = w.run(&["sandbox", "create", "--network", "none", "--name", "box2"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    let ran = w.run_with(&["sandbox", "list"], &[("DOCKER_HOST", "unix:///none")]);
    assert_eq!(ran.code, 0);
    assert!(ran.stderr.contains("Docker's sandboxes are left out"), "{}", ran.stderr);

    let said = |args: &[&str]| w.run(args).stdout;
    assert_eq!(said(&["sandbox", "pause", "box1"]), "box1 is paused.\n");
    assert_eq!(said(&["sandbox", "resume", "box1"]), "box1 is running again.\n");
    assert_eq!(said(&["sandbox", "start", "box1"]), "box1 is running already.\n");
    assert_eq!(said(&["sandbox", "ls", "box1"]), "");
    assert_eq!(said(&["sandbox", "stop", "box1"]), "box1 is stopped.\n");
    let ran = w.run(&["sandbox", "ls", "box1"]);
    assert!(ran.stderr.contains("forkyard sandbox start box1"), "{}", ran.stderr);
    let ran = w.run(&["sandbox", "run", "--provider", "e2b", "true"]);
    assert!(ran.stderr.contains("not part of this version"), "{}", ran.stderr);
}

#[test]
fn a_snapshot_goes_through_a_file() {
    let w = World::new();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    assert_eq!(w.run(&["sandbox", "exec", "box1", "--", "sh", "-c", "echo kept > a.txt"]).code, 0);
    assert_eq!(w.run(&["sandbox", "snapshot", "box1", "--name", "snap1"]).code, 0);
    let ran = w.run(&["sandbox", "snapshots", "--export", "snap1", "snap.tar"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let ran = w.run(&["sandbox", "snapshots", "--import", "snap.tar", "--name", "snap2"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, "snap2\n"), "{}", ran.stderr);
    let ran = w.run(&["sandbox", "run", "--network", "none", "--snapshot", "snap2", "cat", "a.txt"]);
    assert_eq!(ran.stdout, "kept\n", "{}", ran.stderr);
    let ran = w.run(&["sandbox", "snapshots"]);
    assert!(ran.stdout.contains("Provider") && ran.stdout.contains("snap2"), "{}", ran.stdout);
    assert!(ran.stdout.contains("KiB") && !ran.stdout.contains("unknown"), "{}", ran.stdout);

    // By pipes, and what is no archive.
    let pipe = format!(
        "{0} sandbox snapshots --export snap1 - | {0} sandbox snapshots --import - --name snap3",
        env!("CARGO_BIN_EXE_forkyard")
    );
    let done = std::process::Command::new("sh").args(["-c", &pipe]).env("FORKYARD_HOME", w.home()).output();
    let done = done.unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout), "snap3\n", "{}", String::from_utf8_lossy(&done.stderr));
    w.write(&w.repo().join("bad.tar"), "this is no archive");
    let ran = w.run(&["sandbox", "snapshots", "--import", "bad.tar", "--name", "bad"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("hint:"), "{}", ran.stderr);
    assert!(!w.run(&["sandbox", "snapshots"]).stdout.contains("bad"));
    for (args, what) in [
        (&["--export", "nobody", "x.tar"][..], "no snapshot nobody"),
        (&["--import", "snap.tar", "--name", "snap1"], "snapshot snap1 already"),
        (&["--import", "none.tar"], "none.tar"),
    ] {
        let args: Vec<&str> = ["sandbox", "snapshots"].iter().chain(args).copied().collect();
        let ran = w.run(&args);
        assert_eq!(ran.code, 2, "{args:?}");
        assert!(ran.stderr.contains(what), "{args:?}: {}", ran.stderr);
    }
}

#[test]
fn a_folder_can_be_the_root_and_the_network_can_be_narrow() {
    let w = World::new();
    let root = w.dir.path().join("root");
    for dir in ["bin", "etc"] {
        std::fs::create_dir_all(root.join(dir)).unwrap();
    }
    let Some(busybox) =
        ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|p| std::path::Path::new(p).exists())
    else {
        assert!(std::env::var_os("FORKYARD_TEST_REQUIRE").is_none(), "no busybox");
        return;
    };
    for name in ["sh", "cat"] {
        std::fs::copy(busybox, root.join("bin").join(name)).unwrap();
    }
    w.write(&root.join("etc/mine"), "this root\n");
    let image = format!("dir:{}", root.display());
    let ran =
        w.run(&["sandbox", "run", "--network", "none", "--image", &image, "--", "/bin/cat", "/etc/mine"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, "this root\n"), "{}", ran.stderr);
    let ran = w.run(&["sandbox", "run", "--image", "dir:/nowhere", "true"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);

    // Of runs, too; what can't be is said before there is one.
    let forks = World::with_commit();
    for more in [&["--image", "dir:/nowhere"][..], &["--image", &image, "--engine", "temporal"]] {
        let ran = forks.fork(more);
        assert!(
            ran.code == 2 && ran.stderr.contains("dir:") && ran.stderr.contains("hint: "),
            "{}",
            ran.stderr
        );
    }
    assert_eq!(forks.json(&["list", "--json"])["runs"].as_array().unwrap().len(), 0);
    let seen = "cat /etc/mine | /bin/cat > seen.txt; [ -e a.txt ]";
    let ran = forks.fork(&["--image", &image, "--setup", "cat /etc/mine", "--verify", seen]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);

    let made = w.run(&["sandbox", "create", "--name", "n", "--network-rate", "1MiB", "--no-default-allow"]);
    assert_eq!(made.code, 0, "{}", made.stderr);
    let limits = w.json(&["--json", "sandbox", "stats", "n"])["limits"].clone();
    assert_eq!(limits["network_bytes_per_s"], 1 << 20);
    let shown = w.run(&["sandbox", "stats", "n"]).stdout;
    let rate = shown.lines().last().unwrap().trim();
    assert_eq!(rate, "at most 1.0 MiB a second each way, kept by the proxy");
    // All that has a limit says by whom it is kept.
    assert_eq!(shown.matches("kept by").count(), 5, "{shown}");
    let ran = w.run(&["sandbox", "create", "--label", "run=r1"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
}

/// What `--strict` takes and refuses.
#[test]
fn strict_is_content_with_the_kernel_alone() {
    let w = World::new();
    let run = |more: &[&str]| {
        let args = [&["sandbox", "run", "--strict", "--network", "none"][..], more, &["--", "echo", "hi"]];
        w.run(&args.concat())
    };
    let refused = |ran: super::Ran, what: &str, fix: &str| {
        assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{}", ran.stderr);
        let (first, second) = ran.stderr.split_once('\n').unwrap();
        assert!(first.starts_with("error: strict: ") && first.contains(what), "{first}");
        assert!(second.starts_with("hint: ") && second.contains(fix), "{second}");
    };
    let ran = run(&[]);
    if rustix::process::geteuid().is_root() {
        assert_eq!((ran.code, ran.stdout.as_str()), (0, "hi\n"), "{}", ran.stderr);
        // The proxy keeps a rate, on every machine.
        refused(run(&["--network-rate", "1MiB"]), "network limit", "leave the rate out");
        let made = w.run(&["sandbox", "create", "--strict", "--name", "box1", "--network", "none"]);
        assert_eq!(made.code, 0, "{}", made.stderr);
        let shown = w.run(&["sandbox", "stats", "box1"]).stdout;
        assert_eq!(shown.matches("kept by the kernel").count(), 4, "{shown}");
    } else {
        refused(ran, " limit", "");
    }
    assert_eq!(
        w.json(&["sandbox", "list", "--json"])["sandboxes"].as_array().unwrap().len(),
        usize::from(rustix::process::geteuid().is_root())
    );
}
