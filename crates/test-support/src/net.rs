//! Hosts with addresses of their own: network namespaces on a bridge, whose cables can be pulled.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;

/// Two hosts and the bridge between them, on which the test listens. Everything goes away with it, also when a test panics.
pub struct Net {
    /// In the names of all its parts: whose test it is.
    pid: u32,
    address: Ipv4Addr,
}

fn ip(args: &str) -> Result<String, String> {
    let output = Command::new("ip").args(args.split(' ')).output().map_err(|e| format!("ip: {e}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("ip {args}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

impl Net {
    /// None, where namespaces can't be made and need not be.
    pub fn new() -> Option<Net> {
        remove_stale();
        let pid = std::process::id();
        match Net::make(pid) {
            Ok(net) => Some(net),
            Err(why) => {
                assert!(
                    std::env::var_os("FORKYARD_TEST_REQUIRE").is_none(),
                    "network namespaces can't be made (be root, have iproute2): {why}"
                );
                None
            }
        }
    }

    fn make(pid: u32) -> Result<Net, String> {
        // The range is set apart for tests of networks.
        let taken = ip("-4 -o addr show")?;
        let free =
            (1..=254).map(|n| ((pid + n) % 254 + 1) as u8).find(|n| !taken.contains(&format!("198.18.{n}.")));
        let third = free.ok_or("no network of 198.18.0.0/16 is free")?;
        let net = Net { pid, address: Ipv4Addr::new(198, 18, third, 1) };
        let bridge = net.bridge();
        ip(&format!("link add {bridge} type bridge"))?;
        ip(&format!("addr add {}/24 dev {bridge}", net.address))?;
        ip(&format!("link set {bridge} up"))?;
        for host in 0..2 {
            let (name, cable) = (net.netns(host), net.cable(host));
            ip(&format!("netns add {name}"))?;
            ip(&format!("link add {cable} type veth peer name eth0 netns {name}"))?;
            ip(&format!("link set {cable} master {bridge} up"))?;
            ip(&format!("-n {name} addr add {}/24 dev eth0", net.address_of(host)))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link set eth0 up"))?;
        }
        Ok(net)
    }

    /// Where the hosts find what the test serves.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }
    /// A host's own address.
    pub fn address_of(&self, host: u8) -> Ipv4Addr {
        let [a, b, c, _] = self.address.octets();
        Ipv4Addr::new(a, b, c, 10 + host)
    }
    pub fn netns(&self, host: u8) -> String {
        format!("fyt{}n{host}", self.pid)
    }
    /// Becomes `program` inside of the host's namespace: the process is the same.
    pub fn enter(netns: &str, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", netns]).arg(program);
        command
    }
    fn cable(&self, host: u8) -> String {
        format!("fyt{}c{host}", self.pid)
    }
    fn bridge(&self) -> String {
        format!("fyt{}b", self.pid)
    }
    /// Nothing gets through any more, in either direction; whoever waits for an answer goes on waiting.
    pub fn pull(&self, host: u8) {
        ip(&format!("link set {} down", self.cable(host))).unwrap();
    }
    pub fn plug(&self, host: u8) {
        ip(&format!("link set {} up", self.cable(host))).unwrap();
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for host in 0..2 {
            let _ = ip(&format!("link del {}", self.cable(host)));
            let _ = ip(&format!("netns del {}", self.netns(host)));
        }
        let _ = ip(&format!("link del {}", self.bridge()));
    }
}

/// What tests left that were killed: the namespaces and bridges of processes that are gone.
fn remove_stale() {
    let of = |name: &str| -> Option<u32> {
        let digits: String = name.strip_prefix("fyt")?.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().ok()
    };
    let gone = |pid: &u32| !Path::new(&format!("/proc/{pid}")).exists();
    let names = ip("netns list").unwrap_or_default() + &ip("-br link show type bridge").unwrap_or_default();
    for pid in names.lines().filter_map(of).filter(gone) {
        drop(Net { pid, address: Ipv4Addr::LOCALHOST });
    }
}
