//! The user that an image names, by the image's own list of accounts.

use std::io::Read;

use rustix::fs::{Mode, OFlags, ResolveFlags};

use super::super::Inner;
use super::{ImageUser, refused};
use crate::Result;

/// Of a list of accounts; more is not one.
const MAX_PASSWD: u64 = 1 << 20;
/// Of an account's name or home, in bytes: longer than either gets anywhere.
const MAX_NAME: usize = 1024;
/// The kernel's largest id is no id.
const MAX_ID: u32 = u32::MAX - 1;

impl Inner {
    /// The image's /etc/passwd, from the topmost layer that has one; empty if it can't be had. The layers are hostile: no link
    /// is followed.
    pub(super) fn passwd(&self, layers: &[String]) -> String {
        for layer in layers {
            let root = self.state.layer(layer).join("fs");
            let Ok(root) = std::fs::File::open(&root) else { continue };
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
            let Ok(file) = rustix::fs::openat2(&root, "etc/passwd", flags, Mode::empty(), resolve) else {
                continue;
            };
            let (file, mut text) = (std::fs::File::from(file), Vec::new());
            if file.metadata().is_ok_and(|meta| meta.is_file()) {
                let _ = file.take(MAX_PASSWD).read_to_end(&mut text);
            }
            return String::from_utf8_lossy(&text).into_owned();
        }
        String::new()
    }
}

impl ImageUser {
    /// Root is never one: it is Forkyard's own user then.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        let plain = |text: &str| text.len() <= MAX_NAME && !text.contains(|c: char| c.is_control());
        if !(1..=MAX_ID).contains(&self.id) {
            return Err(format!("its user can't have the id {}", self.id));
        }
        if self.name.is_empty() || self.name.contains([':', '/']) || !plain(&self.name) {
            return Err("its user has a name that is not one".into());
        }
        if !self.home.starts_with('/') || !plain(&self.home) {
            return Err("its user has a home that is not an absolute path".into());
        }
        Ok(())
    }
}

/// `named`: `user`, `user:group`, or the same by number. None for root. There is one id inside, so the group goes with it.
pub fn resolve(named: &str, passwd: &str) -> Result<Option<ImageUser>> {
    let user = named.split(':').next().unwrap_or_default();
    let number = user.parse::<u32>().ok();
    let account = passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let (name, id) = (*fields.first()?, fields.get(2)?.parse::<u32>().ok()?);
        let is_it = match number {
            Some(number) => id == number,
            None => name == user,
        };
        let home = fields.get(5).filter(|home| home.starts_with('/') && home.len() > 1);
        is_it.then(|| ImageUser {
            id,
            name: name.into(),
            home: home.map_or("/home/user", |home| *home).into(),
        })
    });
    match (account, number) {
        (Some(account), _) if account.id == 0 => Ok(None),
        (Some(account), _) if account.id <= MAX_ID => Ok(Some(account)),
        (None, Some(0)) => Ok(None),
        (None, Some(id)) if id <= MAX_ID => {
            Ok(Some(ImageUser { id, name: id.to_string(), home: "/home/user".into() }))
        }
        (None, None) if user == "root" => Ok(None),
        _ => Err(refused(format!("its user {user:?} is not in its /etc/passwd"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name_and_by_number() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nbroken\nnode:x:1001:1001::/home/node:/bin/sh\nodd:x:7:7::relative:\n";
        let of = |named: &str| resolve(named, passwd).map(|user| user.map(|u| (u.id, u.name, u.home)));
        let user = |id, name: &str, home: &str| Some((id, name.to_string(), home.to_string()));
        for root in ["root", "0", "0:0", "root:wheel"] {
            assert_eq!(of(root).unwrap(), None, "{root}");
        }
        assert_eq!(of("node").unwrap(), user(1001, "node", "/home/node"));
        assert_eq!(of("1001:5").unwrap(), user(1001, "node", "/home/node"));
        assert_eq!(of("odd").unwrap(), user(7, "odd", "/home/user"));
        assert_eq!(of("4242").unwrap(), user(4242, "4242", "/home/user"));
        assert!(of("nobody-here").is_err() && of("4294967295").is_err());
        assert_eq!(resolve("root", "").unwrap(), None);
    }

    #[test]
    fn a_config_that_no_command_can_have_is_refused() {
        use super::super::{ImageConfig, MAX_VARIABLES};
        let user = |id, name: &str, home: &str| ImageUser { id, name: name.into(), home: home.into() };
        let of = |env: &[(&str, &str)], user: Option<ImageUser>| {
            let env = env.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
            ImageConfig { env, user }.checked()
        };
        assert!(of(&[("A", "b=c\n")], Some(user(1001, "node", "/home/node"))).is_ok());
        let large = "x".repeat(64 << 10);
        for (name, value) in [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "x\0"), ("A", large.as_str())] {
            assert!(of(&[(name, value)], None).is_err(), "{name:?}");
        }
        let many: Vec<String> = (0..=MAX_VARIABLES).map(|n| format!("V{n}")).collect();
        let many: Vec<(&str, &str)> = many.iter().map(|name| (name.as_str(), "")).collect();
        assert!(of(&many, None).is_err() && of(&many[1..], None).is_ok());
        for bad in [
            user(0, "root", "/root"),
            user(u32::MAX, "max", "/home/max"),
            user(7, "", "/home/user"),
            user(7, "a\nb", "/home/user"),
            user(7, "a:b", "/home/user"),
            user(7, &large, "/home/user"),
            user(7, "a", "relative"),
            user(7, "a", "/home/\0"),
        ] {
            assert!(of(&[], Some(bad.clone())).is_err(), "{bad:?}");
        }
    }
}
