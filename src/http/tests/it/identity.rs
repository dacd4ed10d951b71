//! Certificates and keys in files that can, and cannot, be used.

use std::fs;

use baton_http::Identity;

#[test]
fn files_that_cannot_be_used_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["own", "other"] {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        fs::write(at(&format!("{name}.pem")), made.cert.pem()).unwrap();
        fs::write(at(&format!("{name}.key")), made.signing_key.serialize_pem()).unwrap();
    }
    fs::write(at("empty"), "").unwrap();
    for (certificate, key, wrong, why) in [
        ("none.pem", "own.key", "none.pem: ", "No such file"),
        ("own.pem", "none.key", "none.key: ", "No such file"),
        ("empty", "own.key", "empty: ", "no certificate"),
        ("own.pem", "empty", "empty: ", "no items"),
        ("own.pem", "other.key", "own.pem: ", "other.key"),
        ("own.key", "own.key", "own.key: ", "no certificate"),
    ] {
        let error = Identity::of_files(&at(certificate), &at(key)).unwrap_err().to_string();
        assert!(error.contains(wrong) && error.contains(why) && error.contains("give PEM files"), "{error}");
    }
    let chain = [fs::read(at("own.pem")).unwrap(), fs::read(at("other.pem")).unwrap()].concat();
    fs::write(at("chain.pem"), chain).unwrap();
    let identity = Identity::of_files(&at("chain.pem"), &at("own.key")).unwrap();
    assert_eq!(
        (identity.certificates(), format!("{identity:?}")),
        (2, "Identity { certificates: 2, .. }".into())
    );
}
