//! A `baton up` of a test's own: started, waited for, and gone without a trace at the end.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::http::{self, Headers, OpenAnswer, Reply};

/// Longer than anything here takes on a busy machine.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// A running service.
pub struct Service {
    child: Child,
    folder: TempDir,
    /// Where clients are served.
    pub clients: SocketAddr,
    /// Where nodes attach, as `http://ADDRESS:PORT`.
    pub control: String,
}

/// `baton` with no terminal and none of the caller's settings.
pub fn baton(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("BATON")) {
        command.env_remove(name);
    }
    command.current_dir(folder).stdin(Stdio::null()).env("NO_COLOR", "1");
    // Temporary files that a process leaves behind are found here.
    std::fs::create_dir_all(folder.join("tmp")).unwrap();
    command.env("TMPDIR", folder.join("tmp"));
    command
}

/// Runs `baton` to its end: exit code, standard output, standard error.
#[track_caller]
pub fn run(folder: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    run_with(folder, args, &[])
}

/// Runs `baton` to its end with these variables in its environment.
#[track_caller]
pub fn run_with(folder: &Path, args: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let (out, err) = (folder.join("run.out"), folder.join("run.err"));
    let mut command = baton(folder);
    command.args(args).envs(variables.iter().copied());
    command.stdout(File::create(&out).unwrap()).stderr(File::create(&err).unwrap());
    let mut child = command.spawn().unwrap();
    let status = ended(&mut child, TIME_LIMIT).unwrap_or_else(|| {
        child.kill().unwrap();
        panic!("still running after {TIME_LIMIT:?}: baton {args:?}: {}", text(&err))
    });
    (status.code(), text(&out), text(&err))
}

/// Waits for a process's end.
fn ended(child: &mut Child, within: Duration) -> Option<ExitStatus> {
    let until = Instant::now() + within;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if Instant::now() > until {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Sends a signal to a process that may be gone already.
pub fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// Asks until it is so; says what is missing when it never comes.
#[track_caller]
pub fn until(within: Duration, what: &str, mut asked: impl FnMut() -> Option<String>) {
    let end = Instant::now() + within;
    while let Some(missing) = asked() {
        assert!(Instant::now() < end, "{what}: not after {within:?}: {missing}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Service {
    /// Starts `baton up` with `args` and waits until it is ready.
    #[track_caller]
    pub fn up(args: &[&str]) -> Self {
        Self::configured("", args)
    }

    /// Starts the service with a configuration file `baton.toml`, to which its ports are added.
    #[track_caller]
    pub fn configured(config: &str, args: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        if !config.is_empty() {
            std::fs::write(folder.path().join("baton.toml"), config).unwrap();
        }
        Self::start(folder, args)
    }

    /// Starts the service in a prepared folder; `baton.toml` in it is the configuration.
    #[track_caller]
    pub fn start(folder: TempDir, args: &[&str]) -> Self {
        let at = folder.path();
        let mut command = baton(at);
        command.args(["up", "--listen", "127.0.0.1:0"]);
        if at.join("baton.toml").exists() {
            command.args(["--config", "baton.toml"]);
        }
        command
            .args(args)
            .stdout(File::create(at.join("out")).unwrap())
            .stderr(File::create(at.join("err")).unwrap());
        let child = command.spawn().unwrap();
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut service = Self { child, folder, clients: nowhere, control: String::new() };
        service.greeted();
        service
    }

    /// Reads from the greeting where it is.
    #[track_caller]
    fn greeted(&mut self) {
        let until = Instant::now() + TIME_LIMIT;
        loop {
            let said = text(&self.path("out"));
            let word = |after: &str| {
                let rest = said.split_once(after)?.1;
                rest.split_once([' ', '\n']).map(|(word, _)| word.to_owned())
            };
            if let (Some(front), Some(control)) = (word("front door on "), word("--conductor ")) {
                let address = front.split_once("//").unwrap().1;
                (self.clients, self.control) = (address.parse().unwrap(), control);
                return;
            }
            let gone = self.child.try_wait().unwrap();
            assert!(gone.is_none() && Instant::now() < until, "not up ({gone:?}): {said}{}", self.errors());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A file in its folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Its standard error so far.
    pub fn errors(&self) -> String {
        text(&self.path("err"))
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The processes of its nodes, by name, as it said them.
    pub fn nodes(&self) -> Vec<(String, u32)> {
        let said = self.errors();
        let lines = said.lines().filter_map(|line| line.strip_prefix("baton: node "));
        let pair = |line: &str| {
            let (name, pid) = line.split_once(" is process ")?;
            Some((name.to_owned(), pid.parse().ok()?))
        };
        lines.filter_map(pair).collect()
    }

    /// `GET path`.
    #[track_caller]
    pub fn get(&self, path: &str) -> Reply {
        http::call(self.clients, &format!("GET {path}"), &[], "")
            .unwrap_or_else(|e| panic!("{path}: {e}: {}", self.errors()))
    }

    /// `POST path` with a body as it is.
    #[track_caller]
    pub fn post(&self, path: &str, headers: Headers<'_>, body: &str) -> Reply {
        http::call(self.clients, &format!("POST {path}"), headers, body)
            .unwrap_or_else(|e| panic!("{path}: {e}: {}", self.errors()))
    }

    /// A call of OpenAI's API.
    #[track_caller]
    pub fn ask(&self, path: &str, body: &Value) -> Reply {
        self.post(path, &[("content-type", "application/json")], &body.to_string())
    }

    /// Sends a request and leaves the answer open.
    #[track_caller]
    pub fn open(&self, path: &str, body: &Value) -> OpenAnswer {
        OpenAnswer::new(self.clients, &format!("POST {path}"), &[], &body.to_string()).unwrap()
    }

    /// The JSON of `/admin/status`.
    #[track_caller]
    pub fn status(&self) -> Value {
        self.get("/admin/status").ok().json()
    }

    /// Waits until nothing is under way and no node holds or promises anything.
    #[track_caller]
    pub fn quiet(&self, within: Duration) {
        until(within, "everything is let go", || {
            let status = self.status();
            let count = |value: &Value| value.as_u64().unwrap_or(u64::MAX);
            let nodes = status["nodes"].as_array().unwrap();
            let held = nodes.iter().any(|node| {
                ["holds", "running", "reserved_tokens", "waiting", "dispatched", "decodes"]
                    .iter()
                    .any(|what| count(&node[*what]) > 0)
            });
            (count(&status["live_requests"]) > 0 || held || nodes.is_empty())
                .then(|| serde_json::to_string_pretty(&status).unwrap())
        });
    }

    /// Ends it as Ctrl-C does and waits; the exit code.
    #[track_caller]
    pub fn stop(&mut self) -> Option<i32> {
        signal(self.pid(), Signal::INT);
        self.wait(TIME_LIMIT)
    }

    /// Waits for its end; the exit code.
    #[track_caller]
    pub fn wait(&mut self, within: Duration) -> Option<i32> {
        let status = ended(&mut self.child, within);
        status.unwrap_or_else(|| panic!("still running after {within:?}: {}", self.errors())).code()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let nodes = self.nodes();
        signal(self.pid(), Signal::KILL);
        let _ = self.child.wait();
        // They end with it; a stopped one cannot even do that.
        nodes.iter().for_each(|(_, pid)| signal(*pid, Signal::CONT));
        if std::thread::panicking() {
            eprintln!("the service said:\n{}", self.errors());
        }
    }
}

/// A greedy chat of one message.
pub fn chat(text: &str, max_tokens: u32) -> Value {
    // The engines that only keep time draw from the seed, at any temperature.
    json!({"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0, "seed": 7, "ignore_eos": true})
}

/// A greedy completion.
pub fn completion(prompt: &str, max_tokens: u32) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "seed": 7, "ignore_eos": true})
}
