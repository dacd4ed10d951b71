//! Keys and certificates: who is let in, and what is never shown.

use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use super::clients::{missing, output};
use super::service::{Service, chat, until};

const CHAT: &str = "/v1/chat/completions";
const KEYS: &str = "[service]\nadmin_key = \"operators-only\"\n\
    [[service.api_keys]]\nkey = \"key-of-acme\"\ntenant = \"acme\"\n";

#[test]
fn keys_let_in_and_are_not_shown() {
    let service = Service::configured(KEYS, &["--engine", "zero", "--nodes", "1b", "--log", "debug"]);
    let json_type = ("content-type", "application/json");
    let body = chat("Hello", 2).to_string();
    for (header, code) in [(None, "missing_api_key"), (Some("Bearer key-of-nobody"), "invalid_api_key")] {
        let mut headers = vec![json_type];
        headers.extend(header.map(|value| ("authorization", value)));
        let refused = service.post(CHAT, &headers, &body);
        assert_eq!((refused.status, refused.error_code().as_str()), (401, code), "{refused:?}");
    }
    service.post(CHAT, &[json_type, ("authorization", "Bearer key-of-acme")], &body).ok();
    // A client's key does not make an operator.
    for key in ["", "Bearer key-of-acme"] {
        let refused = service.post("/admin/policy/rollback", &[("authorization", key)], "");
        assert_eq!(refused.status, 401, "{refused:?}");
        refused.error_code();
    }
    let operator = [("authorization", "Bearer operators-only")];
    let shown = super::http::call(service.clients, "GET /admin/config", &operator, "").unwrap().ok().text;
    assert!(
        shown.contains("acme") && !shown.contains("key-of-acme") && !shown.contains("operators-only"),
        "{shown}"
    );
    assert!(!service.errors().contains("key-of-acme"), "no key is logged");
    // A liveness probe needs no key.
    assert_eq!(service.get("/health").status, 200);
}

/// The keys of the file are those that count, from the moment that the file is read again.
#[test]
fn keys_follow_their_file() {
    let service = Service::configured(KEYS, &["--engine", "zero", "--nodes", "1b", "--log", "info"]);
    let status = |path: &str, key: &str| {
        let key = format!("Bearer {key}");
        super::http::call(service.clients, path, &[("authorization", &key)], "").unwrap().status
    };
    let models = |key: &str| status("GET /v1/models", key);
    let write = |text: &str| std::fs::write(service.path("baton.toml"), text).unwrap();
    let known = |client: &str, operator: &str| {
        until(Duration::from_secs(20), "the keys are in force", || {
            let now = (models(client), status("GET /admin/status", operator));
            (now != (200, 200)).then(|| format!("{now:?}: {}", service.errors()))
        });
    };
    known("key-of-acme", "operators-only");
    write(&KEYS.replace("key-of-acme", "second-key").replace("operators-only", "second-operator"));
    known("second-key", "second-operator");
    assert_eq!((models("key-of-acme"), status("GET /admin/status", "operators-only")), (401, 401));
    // A file that would let everybody in waits for a word of its own.
    write("[service]\nheartbeat_us = 500000\n");
    until(Duration::from_secs(20), "the open door is named", || {
        (!service.errors().contains("it has no service.api_keys and no service.admin_key"))
            .then(|| service.errors())
    });
    assert_eq!(models("nobody"), 401);
    // Nor does a text that an operator sends.
    let operator = [("authorization", "Bearer second-operator")];
    for text in [KEYS, "[service]\n"] {
        let refused = service.post("/admin/policy", &operator, text);
        assert!(refused.status == 400 && refused.text.contains("configuration file alone"), "{refused:?}");
    }
    super::service::signal(service.pid(), rustix::process::Signal::HUP);
    known("nobody", "nobody");
    assert!(!service.errors().contains("second-key"), "no key is logged");
}

/// Secrets are planted wherever one can be given, wrong and right things are done with them, and everything that
/// Baton printed or answered is searched for them.
#[test]
fn no_output_shows_a_secret() {
    let planted =
        ["ADMIN-PLANTED", "CLIENT-PLANTED", "31337424242", "ADMIN-CHANGED", "CLIENT-CHANGED", "42424231337"];
    let file = |admin: &str, client: &str, seed: &str| {
        format!(
            "[scheduler]\nblock_tokens = 16\n[service]\nadmin_key = \"{admin}\"\nchain_seed = {seed}\n\
             [[service.api_keys]]\nkey = \"{client}\"\ntenant = \"acme\"\n"
        )
    };
    let (old, new) = (file(planted[0], planted[1], planted[2]), file(planted[3], planted[4], planted[5]));
    let service = Service::configured(&old, &["--engine", "zero", "--nodes", "1b", "--log", "trace"]);
    let mut outputs: Vec<(String, String)> = Vec::new();
    let config = service.path("baton.toml");
    let operator = [("authorization", "Bearer ADMIN-PLANTED")];
    // The file is changed, then cut off in the middle of a key; the log speaks of each.
    let watched = [
        (new.clone(), "restart to change service.chain_seed"),
        (new.split_once("CHANGED").unwrap().0.to_owned(), "TOML line "),
    ];
    for (text, named) in watched {
        std::fs::write(&config, text).unwrap();
        super::service::signal(service.pid(), rustix::process::Signal::HUP);
        until(Duration::from_secs(30), named, || {
            (!service.errors().contains(named)).then(|| service.errors())
        });
    }
    for (path, body) in [
        ("POST /admin/policy", new.as_str()),
        ("POST /admin/policy", "[service]\nadmin_key = \"ADMIN-CHANGED\nx"),
        ("POST /admin/policy", "[service]\nchain_seed = \"ADMIN-CHANGED\""),
        ("POST /admin/policy", "[scheduler]\nmax_retries = 3"),
        ("POST /admin/policy/check", new.as_str()),
        ("GET /admin/config", ""),
        ("GET /admin/policy", ""),
        ("GET /admin/page", ""),
        ("GET /admin/status", ""),
        ("GET /metrics", ""),
    ] {
        let reply = super::http::call(service.clients, path, &operator, body).unwrap();
        outputs.push((format!("{path} {body}"), format!("{reply:?}")));
    }
    let model = [("content-type", "application/json"), ("authorization", "Bearer CLIENT-PLANTED")];
    service.post(CHAT, &model, &chat("Hello", 2).to_string()).ok();
    let (old_file, new_file) = (service.path("old.toml"), service.path("new.toml"));
    std::fs::write(&old_file, &old).unwrap();
    std::fs::write(&new_file, &new).unwrap();
    std::fs::write(service.path("bad.toml"), old.replace("\"\nchain", "\nchain")).unwrap();
    let url = format!("http://{}", service.clients);
    for args in [
        &["config", "explain", "old.toml"][..],
        &["config", "diff", "old.toml", "new.toml"],
        &["config", "check", "bad.toml"],
        &["config", "explain", "bad.toml"],
        &["top", "--once", "--url", &url, "--key", "ADMIN-PLANTED"],
        &["top", "--once", "--url", &url, "--key", "ADMIN-CHANGED"],
    ] {
        let (_, out, err) = super::service::run(service.folder(), args);
        assert!(!(out.is_empty() && err.is_empty()), "{args:?} said nothing");
        outputs.push((format!("{args:?}"), out + &err));
    }
    // The change was seen and named, so the search below looks at words about these settings.
    let diff = &outputs.iter().find(|(what, _)| what.contains("diff")).unwrap().1;
    assert!(diff.contains("service.admin_key") && diff.contains("service.api_keys[0].key"), "{diff}");
    outputs.push(("the log".to_owned(), service.errors()));
    for (what, text) in &outputs {
        let shown: Vec<_> = planted.iter().filter(|secret| text.contains(**secret)).collect();
        // `baton top` names no key; its own command line is not output.
        assert!(shown.is_empty(), "{what} shows {shown:?}: {text}");
    }
}

/// A certificate of the day serves HTTPS to a client that trusts it, and to none that does not.
#[test]
fn tls_serves_who_trusts_its_certificate() {
    if missing("openssl", "version") || missing("curl", "--version") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let made = output(Command::new("openssl").current_dir(folder.path()).args([
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        "key.pem",
        "-out",
        "cert.pem",
    ]));
    assert!(made.status.success(), "{made:?}");
    let config =
        "[scheduler]\nblock_tokens = 16\n[service]\ntls_cert = \"cert.pem\"\ntls_key = \"key.pem\"\n";
    std::fs::write(folder.path().join("baton.toml"), config).unwrap();
    let service = Service::start(folder, &["--engine", "zero", "--nodes", "1b"]);
    let url = format!("https://{}/v1/models", service.clients);
    for (version, args) in [("HTTP/2", "--http2"), ("HTTP/1.1", "--http1.1")] {
        let mut curl = Command::new("curl");
        curl.current_dir(service.folder()).args([
            "-sSi",
            args,
            "--noproxy",
            "*",
            "--cacert",
            "cert.pem",
            &url,
        ]);
        let answer = output(&mut curl);
        let text = String::from_utf8_lossy(&answer.stdout);
        assert!(text.starts_with(version) && text.contains("\"object\":\"list\""), "{version}: {answer:?}");
    }
    let distrust = output(Command::new("curl").args(["-sS", "--noproxy", "*", &url]));
    assert!(!distrust.status.success(), "{distrust:?}");
    // A client without TLS gets no answer, and does no harm.
    assert!(super::http::call(service.clients, "GET /health", &[], "").is_err());
    let again = output(Command::new("curl").args(["-sSk", "--noproxy", "*", &url]));
    assert!(again.status.success(), "{again:?}");
}
