//! The Kubernetes manifests: each is read, and each name that one uses of another is looked for.

use std::path::{Path, PathBuf};

use serde::Deserialize as _;
use serde_json::Value;

use super::{files, node_blocks, parsed, root};
use crate::cli::Command;

/// The group, and kind, of everything that a cluster may be asked for here.
const KNOWN: [(&str, &str); 12] = [
    ("v1", "ServiceAccount"),
    ("rbac.authorization.k8s.io/v1", "Role"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    ("v1", "ConfigMap"),
    ("v1", "Namespace"),
    ("v1", "PersistentVolumeClaim"),
    ("v1", "Service"),
    ("apps/v1", "Deployment"),
    ("apps/v1", "StatefulSet"),
    ("policy/v1", "PodDisruptionBudget"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("kustomize.config.k8s.io/v1beta1", "Kustomization"),
];

fn folder() -> PathBuf {
    root().join("kubernetes")
}

fn documents(path: &Path) -> Vec<Value> {
    let text = super::read(path);
    serde_yaml_ng::Deserializer::from_str(&text)
        .map(|one| Value::deserialize(one).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
        .collect()
}

fn base() -> Vec<Value> {
    objects_in(&folder().join("base"))
}

fn objects_in(folder: &Path) -> Vec<Value> {
    files(folder)
        .iter()
        .filter(|path| !path.ends_with("kustomization.yaml"))
        .flat_map(|path| documents(path))
        .collect()
}

fn text<'a>(value: &'a Value, at: &str) -> &'a str {
    value.pointer(at).and_then(Value::as_str).unwrap_or_default()
}

fn list<'a>(value: &'a Value, at: &str) -> &'a [Value] {
    value.pointer(at).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The faults of a set of objects: names that lead nowhere, ports that do not exist, labels that no object has.
fn faults(objects: &[Value]) -> Vec<String> {
    let mut wrong = Vec::new();
    let named = |kind: &str, name: &str| {
        objects.iter().any(|one| text(one, "/kind") == kind && text(one, "/metadata/name") == name)
    };
    for object in objects {
        let who = format!("{} {}", text(object, "/kind"), text(object, "/metadata/name"));
        if !KNOWN.contains(&(text(object, "/apiVersion"), text(object, "/kind"))) {
            wrong.push(format!("{who}: no kind of {}", text(object, "/apiVersion")));
        }
        let name = text(object, "/metadata/name");
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || name.len() > 63 || !name.chars().all(fits) {
            wrong.push(format!("{who}: no name"));
        }
        match text(object, "/kind") {
            "Deployment" | "StatefulSet" => {
                let pod = &object["spec"]["template"];
                if object["spec"]["selector"]["matchLabels"]["app"] != pod["metadata"]["labels"]["app"] {
                    wrong.push(format!("{who}: selects other pods than its own"));
                }
                let service = text(object, "/spec/serviceName");
                if !service.is_empty() && !named("Service", service) {
                    wrong.push(format!("{who}: serviceName {service} is not there"));
                }
                for volume in list(pod, "/spec/volumes") {
                    for (kind, at) in [
                        ("ConfigMap", "/configMap/name"),
                        ("PersistentVolumeClaim", "/persistentVolumeClaim/claimName"),
                    ] {
                        let of = text(volume, at);
                        if !of.is_empty() && !named(kind, of) {
                            wrong.push(format!("{who}: {kind} {of} is not there"));
                        }
                    }
                }
                containers(&who, pod, &mut wrong);
            }
            "Service" => service(&who, object, objects, &mut wrong),
            "PodDisruptionBudget" => disruption(&who, object, objects, &mut wrong),
            "NetworkPolicy" => policy(&who, object, objects, &mut wrong),
            _ => {}
        }
    }
    wrong
}

fn containers(who: &str, pod: &Value, wrong: &mut Vec<String>) {
    let volumes: Vec<&str> = list(pod, "/spec/volumes").iter().map(|volume| text(volume, "/name")).collect();
    for container in list(pod, "/spec/containers") {
        let who = format!("{who}/{}", text(container, "/name"));
        for required in ["/name", "/image"] {
            if text(container, required).is_empty() {
                wrong.push(format!("{who}: no {required}"));
            }
        }
        if container.pointer("/resources/requests").is_none()
            || container.pointer("/resources/limits").is_none()
        {
            wrong.push(format!("{who}: no resources"));
        }
        for mount in list(container, "/volumeMounts") {
            if !volumes.contains(&text(mount, "/name")) {
                wrong.push(format!("{who}: mounts {}, which is no volume", text(mount, "/name")));
            }
        }
        for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
            let port = text(container, &format!("/{probe}/httpGet/port"));
            let ports = list(container, "/ports");
            if !port.is_empty() && !ports.iter().any(|known| text(known, "/name") == port) {
                wrong.push(format!("{who}: {probe} asks port {port}, which is not there"));
            }
        }
    }
}

/// Workloads whose pods have these labels.
fn selected<'a>(labels: Option<&Value>, objects: &'a [Value]) -> Vec<&'a Value> {
    let wanted = labels.and_then(Value::as_object);
    let has = |object: &&Value| {
        let pod = object.pointer("/spec/template/metadata/labels");
        wanted.zip(pod).is_some_and(|(wanted, pod)| wanted.iter().all(|(name, value)| &pod[name] == value))
    };
    objects.iter().filter(has).collect()
}

fn service(who: &str, object: &Value, objects: &[Value], wrong: &mut Vec<String>) {
    let pods = selected(object.pointer("/spec/selector"), objects);
    if pods.is_empty() {
        wrong.push(format!("{who}: selects nothing"));
    }
    for port in list(object, "/spec/ports") {
        let target = text(port, "/targetPort");
        let has = |pod: &&Value| {
            let containers = list(pod, "/spec/template/spec/containers").iter();
            containers.flat_map(|c| list(c, "/ports")).any(|known| text(known, "/name") == target)
        };
        if !pods.iter().all(has) {
            wrong.push(format!("{who}: port {target} is no port of its pods"));
        }
    }
}

fn disruption(who: &str, object: &Value, objects: &[Value], wrong: &mut Vec<String>) {
    if selected(object.pointer("/spec/selector/matchLabels"), objects).is_empty() {
        wrong.push(format!("{who}: selects nothing"));
    }
}

fn policy(who: &str, object: &Value, objects: &[Value], wrong: &mut Vec<String>) {
    let from = list(object, "/spec/ingress").iter().flat_map(|rule| list(rule, "/from"));
    let selectors = from.filter_map(|peer| peer.pointer("/podSelector/matchLabels"));
    for labels in selectors.chain(object.pointer("/spec/podSelector/matchLabels")) {
        if selected(Some(labels), objects).is_empty() {
            wrong.push(format!("{who}: {labels} selects nothing"));
        }
    }
}

fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = objects.iter().find(|one| text(one, "/kind") == kind && text(one, "/metadata/name") == name);
    found.unwrap_or_else(|| panic!("{kind} {name} is not there"))
}

fn config_of(map: &Value) -> crate::config::Config {
    let file = map["data"]["baton.toml"].as_str().expect("a file of ours");
    crate::config::parse(file).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn every_name_in_the_base_leads_somewhere() {
    let objects = base();
    assert!(objects.len() >= 12, "{} objects", objects.len());
    assert_eq!(faults(&objects), Vec::<String>::new());
}

#[test]
fn a_front_door_that_finds_its_servers_may_and_they_are_there() {
    let folder = root().join("kubernetes-servers");
    let objects = objects_in(&folder);
    assert_eq!(faults(&objects), Vec::<String>::new());
    let whole = &documents(&folder.join("kustomization.yaml"))[0];
    assert_eq!(list(whole, "/resources").len() + 1, files(&folder).len(), "each file is used");
    let front = find(&objects, "Deployment", "baton");
    let pod = &front["spec"]["template"]["spec"];
    let args = list(pod, "/containers/0/args").iter().filter_map(Value::as_str).map(str::to_owned);
    let words: Vec<String> = std::iter::once("baton".to_owned()).chain(args).collect();
    assert!(matches!(parsed(&words), Command::Serve(_)));
    // The service that it looks for exists under that name, and its account may read it.
    let source = words.iter().find_map(|word| word.strip_prefix("--servers=kubernetes:")).expect("a service");
    let (name, port) = source.split_once(':').expect("a port");
    let service = find(&objects, "Service", name);
    assert!(list(service, "/spec/ports").iter().any(|one| text(one, "/name") == port));
    assert_eq!(service["metadata"]["labels"]["baton.dev/role"], "both");
    let account = text(pod, "/serviceAccountName");
    find(&objects, "ServiceAccount", account);
    let binding = find(&objects, "RoleBinding", "baton-servers");
    assert_eq!(
        (text(binding, "/subjects/0/name"), text(binding, "/subjects/0/kind")),
        (account, "ServiceAccount")
    );
    let role = find(&objects, "Role", text(binding, "/roleRef/name"));
    let rule = &role["rules"][0];
    assert_eq!(rule["resources"], serde_json::json!(["endpointslices"]));
    assert_eq!(rule["verbs"], serde_json::json!(["list", "watch"]));
    let config = config_of(find(&objects, "ConfigMap", "baton-config"));
    let engine = find(&objects, "Deployment", "vllm");
    let args = list(engine, "/spec/template/spec/containers/0/args");
    assert!(
        args.contains(&Value::from(format!("--block-size={}", config.scheduler.block_tokens))),
        "{args:?}"
    );
    assert!(!config.scheduler.fetch);
}

#[test]
fn planted_faults_are_found() {
    let plant = |kind: &str, name: &str, at: &str, value: Value| {
        let mut objects = base();
        let object = objects
            .iter_mut()
            .find(|one| text(one, "/kind") == kind && text(one, "/metadata/name") == name)
            .expect("it is there");
        *object.pointer_mut(at).unwrap_or_else(|| panic!("{kind} {name} has no {at}")) = value;
        faults(&objects)
    };
    let pod = "/spec/template/spec";
    for (kind, name, at, word) in [
        ("Deployment", "baton", format!("{pod}/volumes/0/configMap/name"), "ConfigMap x is not there"),
        (
            "Deployment",
            "baton",
            format!("{pod}/containers/0/livenessProbe/httpGet/port"),
            "livenessProbe asks port x",
        ),
        ("Deployment", "baton", format!("{pod}/containers/0/volumeMounts/0/name"), "no volume"),
        ("Deployment", "baton", "/apiVersion".into(), "no kind of x"),
        ("StatefulSet", "vllm-decode", "/spec/serviceName".into(), "serviceName x is not there"),
        ("StatefulSet", "vllm-decode", "/spec/selector/matchLabels/app".into(), "other pods"),
        ("Service", "baton-control", "/spec/ports/0/targetPort".into(), "port x is no port"),
        ("Service", "baton", "/spec/selector/app".into(), "selects nothing"),
        ("PodDisruptionBudget", "vllm-prefill", "/spec/selector/matchLabels/app".into(), "selects nothing"),
        (
            "NetworkPolicy",
            "baton-engines",
            "/spec/podSelector/matchLabels/baton-node".into(),
            "selects nothing",
        ),
    ] {
        let found = plant(kind, name, &at, "x".into());
        assert!(found.iter().any(|fault| fault.contains(word)), "{kind} {name} {at}: {found:?}");
    }
    assert!(!plant("Service", "baton", "/metadata/name", "Not A Name".into()).is_empty());
}

#[test]
fn the_front_door_is_asked_for_health_and_readiness_and_nodes_find_it_before_it_is_ready() {
    let objects = base();
    let front = find(&objects, "Deployment", "baton");
    let container = "/spec/template/spec/containers/0";
    assert_eq!(text(front, &format!("{container}/livenessProbe/httpGet/path")), "/health");
    assert_eq!(text(front, &format!("{container}/readinessProbe/httpGet/path")), "/ready");
    assert_eq!(
        (front["spec"]["replicas"].as_u64(), text(front, "/spec/strategy/type")),
        (Some(1), "Recreate")
    );
    let control = find(&objects, "Service", "baton-control");
    assert_eq!(control["spec"]["publishNotReadyAddresses"], true);
    let config = config_of(find(&objects, "ConfigMap", "baton-config"));
    let grace_us =
        front["spec"]["template"]["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap_or(0) * 1_000_000;
    assert!(grace_us > config.service.drain_us, "it is killed while it drains");
    let ports = list(front, &format!("{container}/ports")).iter().map(|port| port["containerPort"].as_u64());
    let told = [&config.service.listen, &config.service.control]
        .map(|a| a.rsplit(':').next().and_then(|p| p.parse().ok()));
    assert_eq!(ports.collect::<Vec<_>>(), told);
    let args = list(front, &format!("{container}/args")).iter().filter_map(Value::as_str).map(str::to_owned);
    let words: Vec<String> = std::iter::once("baton".to_owned()).chain(args).collect();
    assert!(matches!(parsed(&words), Command::Serve(_)));
}

#[test]
fn nodes_beside_their_engines_say_the_same_as_these_and_as_the_configuration() {
    let objects = base();
    let config = config_of(find(&objects, "ConfigMap", "baton-config"));
    for role in ["prefill", "decode"] {
        let set = find(&objects, "StatefulSet", &format!("vllm-{role}"));
        assert_eq!(set["spec"]["template"]["spec"]["enableServiceLinks"], false, "vLLM reads VLLM_PORT");
        let of = |name: &str| {
            let all = list(set, "/spec/template/spec/containers");
            let container = all.iter().find(|c| text(c, "/name") == name).expect("the container");
            list(container, "/args").iter().filter_map(Value::as_str).map(str::to_owned).collect::<Vec<_>>()
        };
        let (engine, node) = (of("vllm"), of("node"));
        let named = |arg: &String| arg.replace("$(POD_NAME)", &format!("{}0", &role[..1]));
        let words: Vec<String> = std::iter::once("baton".to_owned()).chain(node.iter().map(named)).collect();
        assert_eq!(node_blocks(&parsed(&words)), Some(config.scheduler.block_tokens));
        assert!(node.contains(&format!("--role={role}")), "{node:?}");
        assert!(engine.contains(&format!("--block-size={}", config.scheduler.block_tokens)), "{engine:?}");
        let port = engine.iter().find_map(|arg| arg.strip_prefix("--port=")).expect("a port");
        assert!(node.contains(&format!("--url=http://127.0.0.1:{port}")), "{node:?}");
        let control =
            node.iter().find_map(|arg| arg.strip_prefix("--conductor=http://")).expect("a conductor");
        let (service, port) = control.split_once(':').expect("host and port");
        let service = find(&objects, "Service", service);
        assert_eq!(service["spec"]["ports"][0]["port"].as_u64(), port.parse().ok());
        let json = |option: &str| -> Value {
            let given = engine.iter().find_map(|arg| arg.strip_prefix(option)).expect("the option");
            serde_json::from_str(given).unwrap_or_else(|e| panic!("{option}: {e}"))
        };
        assert_eq!(json("--kv-transfer-config=")["kv_connector"], "NixlConnector");
        let events = json("--kv-events-config=");
        assert_eq!(
            events["endpoint"].as_str().map(|e| e.replace('*', "127.0.0.1")),
            Some("tcp://127.0.0.1:5557".into())
        );
        assert!(node.contains(&format!("--events-replay={}", text(&events, "/replay_endpoint"))), "{node:?}");
    }
}

#[test]
fn what_is_put_together_is_there() {
    let mut seen = 0;
    for path in files(&folder()).iter().filter(|path| path.ends_with("kustomization.yaml")) {
        let here = path.parent().expect("a folder");
        let whole = &documents(path)[0];
        assert!(KNOWN.contains(&(text(whole, "/apiVersion"), text(whole, "/kind"))), "{}", path.display());
        let patches = list(whole, "/patches").iter().map(|patch| text(patch, "/path"));
        let resources = list(whole, "/resources").iter().filter_map(Value::as_str);
        let mut used: Vec<PathBuf> = Vec::new();
        for name in patches.clone().chain(resources) {
            let file = here.join(name);
            assert!(file.exists(), "{}: {name} is not there", path.display());
            used.push(file);
        }
        for file in files(here).iter().filter(|file| !file.ends_with("kustomization.yaml")) {
            assert!(used.contains(file), "{} is used by nobody", file.display());
        }
        let objects = base();
        for patch in patches.flat_map(|name| documents(&here.join(name))) {
            find(&objects, text(&patch, "/kind"), text(&patch, "/metadata/name"));
            if text(&patch, "/metadata/name") == "baton-config" {
                let (ours, base) =
                    (config_of(&patch), config_of(find(&objects, "ConfigMap", "baton-config")));
                assert_eq!(ours.scheduler.block_tokens, base.scheduler.block_tokens);
                assert_eq!((ours.scheduler.fetch, ours.service.control), (false, base.service.control));
            }
        }
        for scaled in list(whole, "/replicas") {
            find(&objects, "StatefulSet", text(scaled, "/name"));
        }
        let images = |pod: &Value| {
            let all =
                list(pod, "/spec/template/spec/containers").iter().map(|c| text(c, "/image").to_owned());
            all.collect::<Vec<_>>()
        };
        for image in list(whole, "/images") {
            let name = format!("{}:", text(image, "/name"));
            assert!(
                objects.iter().flat_map(images).any(|known| known.starts_with(&name)),
                "nobody runs {name}"
            );
        }
        seen += 1;
    }
    assert_eq!(seen, 2);
}
