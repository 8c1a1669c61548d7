//! Contents of project files that the user has read and trusts: SHA-256 sums, one a line, in the home. A changed file is
//! another content and is not trusted.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

const FILE: &str = "trusted";

/// The list of one home.
#[derive(Debug, Clone)]
pub struct Trust {
    path: PathBuf,
}

impl Trust {
    pub fn new(home: &Path) -> Self {
        Trust { path: home.join(FILE) }
    }

    pub fn sum(content: &str) -> String {
        Sha256::digest(content.as_bytes()).iter().map(|b| format!("{b:02x}")).collect()
    }

    fn lines(&self) -> io::Result<Vec<String>> {
        match fs::read_to_string(&self.path) {
            Ok(text) => Ok(text.lines().map(str::to_string).collect()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(e),
        }
    }

    pub fn is_trusted(&self, content: &str) -> io::Result<bool> {
        let sum = Self::sum(content);
        Ok(self.lines()?.iter().any(|l| l.split_whitespace().next() == Some(&sum)))
    }

    /// `note` says where it was seen, for those who read the list.
    pub fn add(&self, content: &str, note: &str) -> io::Result<()> {
        if self.is_trusted(content)? {
            return Ok(());
        }
        let note: String = note.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        let mut lines = self.lines()?;
        lines.push(format!("{} {note}", Self::sum(content)));
        self.write(&lines)
    }

    /// Whether it was trusted before.
    pub fn remove(&self, content: &str) -> io::Result<bool> {
        let sum = Self::sum(content);
        let lines = self.lines()?;
        let kept: Vec<String> =
            lines.iter().filter(|l| l.split_whitespace().next() != Some(&sum)).cloned().collect();
        if kept.len() == lines.len() {
            return Ok(false);
        }
        self.write(&kept)?;
        Ok(true)
    }

    /// As a whole: a torn list would forget or, worse, invent.
    fn write(&self, lines: &[String]) -> io::Result<()> {
        let dir = self.path.parent().expect("the list lies in the home");
        fs::create_dir_all(dir)?;
        let temporary = dir.join(format!(".{FILE}.{}", std::process::id()));
        let mut file = fs::File::create(&temporary)?;
        for line in lines {
            writeln!(file, "{line}")?;
        }
        file.sync_all()?;
        fs::rename(&temporary, &self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trust_is_of_exact_content() {
        let home = tempfile::tempdir().unwrap();
        let trust = Trust::new(&home.path().join("new"));
        assert!(!trust.is_trusted("a = 1").unwrap());
        trust.add("a = 1", "/x/forkyard.toml\nforged").unwrap();
        trust.add("a = 1", "again").unwrap();
        assert!(trust.is_trusted("a = 1").unwrap());
        assert!(!trust.is_trusted("a = 1\n").unwrap());
        assert_eq!(trust.lines().unwrap().len(), 1);
        assert!(trust.remove("a = 1").unwrap());
        assert!(!trust.remove("a = 1").unwrap());
        assert!(!trust.is_trusted("a = 1").unwrap());
    }
}
