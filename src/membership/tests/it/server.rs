//! An etcd of one's own.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use baton_membership::{Etcd, EtcdConfig};

/// One etcd, gone with this.
pub struct Server {
    child: Option<Child>,
    folder: tempfile::TempDir,
    port: u16,
    peer: u16,
    more: Vec<String>,
    scheme: &'static str,
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("bound").port()
}

impl Server {
    /// One that answers.
    pub async fn start() -> Self {
        let mut server = Self::with("http", Vec::new());
        server.go();
        server.answers().await;
        server
    }

    /// One that is not running yet.
    pub fn with(scheme: &'static str, more: Vec<String>) -> Self {
        let folder = tempfile::Builder::new().prefix("baton-etcd").tempdir().expect("a folder");
        Self { child: None, folder, port: free_port(), peer: free_port(), more, scheme }
    }

    /// Starts it, on what it kept.
    pub fn go(&mut self) {
        let log = std::fs::File::create(self.folder.path().join("log")).expect("a log");
        let (clients, peers) = (self.address(), format!("http://127.0.0.1:{}", self.peer));
        let child = Command::new("etcd")
            .args(["--name", "one", "--heartbeat-interval", "20", "--election-timeout", "200"])
            .args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients])
            .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
            .args(["--initial-cluster", &format!("one={peers}")])
            .arg("--data-dir")
            .arg(self.folder.path().join("data"))
            .args(&self.more)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        self.child = Some(child.unwrap_or_else(|e| {
            panic!("etcd cannot be started ({e}); install it with scripts/ready.sh etcd, or apt-get install etcd-server")
        }));
    }

    /// Waits until it answers.
    pub async fn answers(&mut self) {
        let deadline = tokio::time::Instant::now() + crate::SOON;
        let client = self.client();
        while client.get("/").await.is_err() {
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok()).flatten();
            assert!(
                ended.is_none() && tokio::time::Instant::now() < deadline,
                "etcd does not answer: {ended:?}\n{}",
                std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
            );
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }

    /// Ends it at once, as a power cut does.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("it can be killed");
            child.wait().expect("it has ended");
        }
    }

    /// Further words for its command line.
    pub fn set_more(&mut self, more: Vec<String>) {
        self.more = more;
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn address(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.port)
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A client with a short time limit.
    pub fn client(&self) -> Etcd {
        client(vec![self.address()])
    }
}

/// A client of `endpoints` with a short time limit.
pub fn client(endpoints: Vec<String>) -> Etcd {
    Etcd::new(config(endpoints)).expect("a client")
}

/// Settings with a short time limit.
pub fn config(endpoints: Vec<String>) -> EtcdConfig {
    EtcdConfig { request_timeout_us: 400_000, silence_us: 1_000_000, ..EtcdConfig::new(endpoints) }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
