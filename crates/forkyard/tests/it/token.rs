use super::World;

#[test]
fn a_token_is_made_shown_once_listed_and_revoked() {
    let w = World::new();
    assert!(w.run(&["token", "list"]).stdout.starts_with("There is no token."));
    let made = w.json(&["token", "create", "laptop", "--scope", "steer", "--expires", "90d", "--json"]);
    let (id, text) = (made["id"].as_str().unwrap(), made["token"].as_str().unwrap());
    assert!(text.starts_with(&format!("fy_{id}_")) && text.len() > 70, "{made}");
    // What the secret is, nobody knows any more.
    let secret = text.rsplit('_').next().unwrap();
    let list = w.run(&["token", "list"]);
    assert!(list.stdout.contains("laptop") && list.stdout.contains("valid"), "{}", list.stdout);
    for file in std::fs::read_dir(w.home()).unwrap().flatten().filter(|f| f.path().is_file()) {
        let bytes = std::fs::read(file.path()).unwrap();
        let found = bytes.windows(secret.len()).any(|b| b == secret.as_bytes());
        assert!(!found, "the secret is in {}", file.path().display());
    }
    assert_eq!(w.run(&["token", "revoke", id]).code, 0);
    assert_eq!(w.json(&["token", "list", "--json"])["tokens"][0]["state"], "revoked");
    let ran = w.run(&["token", "revoke", "nobody"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("there is no token"), "{}", ran.stderr);
    for args in
        [&["token", "create", "x", "--scope", "root"][..], &["token", "create", "x", "--expires", "soon"]]
    {
        assert_eq!(w.run(args).code, 2, "{args:?}");
    }
}
