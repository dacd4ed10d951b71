//! Keys and certificates: who is let in, and what is never shown.

use std::process::Command;

use tempfile::TempDir;

use super::clients::{missing, output};
use super::service::{Service, chat};

const CHAT: &str = "/v1/chat/completions";
const KEYS: &str = "[scheduler]\nblock_tokens = 16\n[service]\nadmin_key = \"operators-only\"\n\
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
    // Whoever looks whether it is alive needs none.
    assert_eq!(service.get("/health").status, 200);
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
    // Who speaks no TLS gets no answer, and does no harm.
    assert!(super::http::call(service.clients, "GET /health", &[], "").is_err());
    let again = output(Command::new("curl").args(["-sSk", "--noproxy", "*", &url]));
    assert!(again.status.success(), "{again:?}");
}
