//! The Kubernetes manifests, as the Helm chart renders them (`make test-helm`): each is read, and each name that one uses of
//! another is looked for.

use serde::Deserialize as _;
use serde_json::Value;

use super::{node_blocks, parsed, root};
use crate::cli::Command;

/// The group, and kind, of everything that a cluster may be asked for here.
const KNOWN: [(&str, &str); 12] = [
    ("v1", "ServiceAccount"),
    ("rbac.authorization.k8s.io/v1", "Role"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    ("v1", "ConfigMap"),
    ("v1", "PersistentVolumeClaim"),
    ("v1", "Service"),
    ("apps/v1", "Deployment"),
    ("apps/v1", "StatefulSet"),
    ("policy/v1", "PodDisruptionBudget"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("monitoring.coreos.com/v1", "ServiceMonitor"),
    ("keda.sh/v1alpha1", "ScaledObject"),
];

/// The objects of an example, by the end of its folder's name.
fn objects_of(example: &str) -> Vec<Value> {
    let path = root().join(format!("kubernetes-{example}/manifests.yaml"));
    serde_yaml_ng::Deserializer::from_str(&super::read(&path))
        .map(|one| Value::deserialize(one).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
        .filter(|one| !one.is_null())
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
                if !selects(object.pointer("/spec/selector/matchLabels"), object) {
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
            "ServiceMonitor" => scraped(&who, object, objects, &mut wrong),
            "ScaledObject" => {
                let scaled =
                    (text(object, "/spec/scaleTargetRef/kind"), text(object, "/spec/scaleTargetRef/name"));
                if !named(scaled.0, scaled.1) {
                    wrong.push(format!("{who}: scales {scaled:?}, which is not there"));
                }
            }
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

/// Whether the pods of a workload have these labels.
fn selects(labels: Option<&Value>, workload: &Value) -> bool {
    let wanted = labels.and_then(Value::as_object);
    let pod = workload.pointer("/spec/template/metadata/labels");
    wanted.zip(pod).is_some_and(|(wanted, pod)| wanted.iter().all(|(name, value)| &pod[name] == value))
}

/// Workloads whose pods have these labels.
fn selected<'a>(labels: Option<&Value>, objects: &'a [Value]) -> Vec<&'a Value> {
    objects.iter().filter(|object| selects(labels, object)).collect()
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

fn scraped(who: &str, object: &Value, objects: &[Value], wrong: &mut Vec<String>) {
    let wanted = object.pointer("/spec/selector/matchLabels").and_then(Value::as_object);
    let has = |service: &&Value| {
        let labels = &service["metadata"]["labels"];
        text(service, "/kind") == "Service"
            && wanted.is_some_and(|all| all.iter().all(|(k, v)| &labels[k] == v))
    };
    let services: Vec<&Value> = objects.iter().filter(has).collect();
    let asked = |service: &&Value, port: &str| {
        list(service, "/spec/ports").iter().any(|one| text(one, "/name") == port)
    };
    for endpoint in list(object, "/spec/endpoints") {
        let port = text(endpoint, "/port");
        if services.is_empty() || !services.iter().all(|service| asked(service, port)) {
            wrong.push(format!("{who}: no Service with port {port}"));
        }
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

/// A container's arguments.
fn arguments(workload: &Value, container: &str) -> Vec<String> {
    let all = list(workload, "/spec/template/spec/containers");
    let found = all.iter().find(|one| text(one, "/name") == container).expect("the container");
    list(found, "/args").iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// The command of a container of ours, with the name and the address that its pod would have.
fn command(workload: &Value, container: &str, name: &str) -> (Command, Vec<String>) {
    let given = |arg: String| arg.replace("$(POD_NAME)", name).replace("$(POD_IP)", "10.0.0.7");
    let args: Vec<String> = arguments(workload, container).into_iter().map(given).collect();
    let words: Vec<String> = std::iter::once("baton".to_owned()).chain(args.iter().cloned()).collect();
    (parsed(&words), args)
}

fn port_of(args: &[String], option: &str) -> Option<u64> {
    args.iter().find_map(|arg| arg.strip_prefix(option))?.rsplit(':').next()?.parse().ok()
}

#[test]
fn every_name_in_the_manifests_leads_somewhere() {
    for (example, least) in [("pairs", 13), ("servers", 11), ("ha", 13)] {
        let objects = objects_of(example);
        assert!(objects.len() >= least, "{example}: {} objects", objects.len());
        let outside =
            |fault: &String| example == "ha" && fault.contains("PersistentVolumeClaim models is not there");
        let faults: Vec<String> = faults(&objects).into_iter().filter(|fault| !outside(fault)).collect();
        assert_eq!(faults, Vec::<String>::new(), "{example}");
    }
}

#[test]
fn a_front_door_that_finds_its_servers_may_and_they_are_there() {
    let objects = objects_of("servers");
    let front = find(&objects, "Deployment", "baton");
    let (serves, args) = command(front, "baton", "baton");
    assert!(matches!(serves, Command::Serve(_)));
    // The service that it looks for exists under that name, and its account may read it.
    let source = args.iter().find_map(|word| word.strip_prefix("--servers=kubernetes:")).expect("a service");
    let (name, port) = source.split_once(':').expect("a port");
    let service = find(&objects, "Service", name);
    assert!(list(service, "/spec/ports").iter().any(|one| text(one, "/name") == port));
    assert_eq!(service["metadata"]["labels"]["baton.dev/role"], "both");
    let account = text(front, "/spec/template/spec/serviceAccountName");
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
    let engine = arguments(find(&objects, "Deployment", "baton-engines"), "vllm");
    assert!(engine.contains(&format!("--block-size={}", config.scheduler.block_tokens)), "{engine:?}");
    assert!(!config.scheduler.fetch);
}

#[test]
fn planted_faults_are_found() {
    let plant = |kind: &str, name: &str, at: &str, value: Value| {
        let mut objects = objects_of("pairs");
        let object = objects
            .iter_mut()
            .find(|one| text(one, "/kind") == kind && text(one, "/metadata/name") == name)
            .expect("it is there");
        *object.pointer_mut(at).unwrap_or_else(|| panic!("{kind} {name} has no {at}")) = value;
        faults(&objects)
    };
    let (pod, component) = ("/spec/template/spec", "app.kubernetes.io~1component");
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
        ("StatefulSet", "baton-decode", "/spec/serviceName".into(), "serviceName x is not there"),
        ("StatefulSet", "baton-decode", format!("/spec/selector/matchLabels/{component}"), "other pods"),
        ("Service", "baton-control", "/spec/ports/0/targetPort".into(), "port x is no port"),
        ("Service", "baton", format!("/spec/selector/{component}"), "selects nothing"),
        (
            "PodDisruptionBudget",
            "baton-prefill",
            format!("/spec/selector/matchLabels/{component}"),
            "selects nothing",
        ),
        (
            "NetworkPolicy",
            "baton-engines",
            "/spec/podSelector/matchLabels/baton.dev~1engine".into(),
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
    let objects = objects_of("pairs");
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
    let (serves, args) = command(front, "baton", "baton");
    assert!(matches!(serves, Command::Serve(_)));
    let ports = list(front, &format!("{container}/ports")).iter().map(|port| port["containerPort"].as_u64());
    assert_eq!(ports.collect::<Vec<_>>(), [port_of(&args, "--listen="), port_of(&args, "--control=")]);
}

#[test]
fn front_doors_that_elect_one_share_an_etcd_with_their_nodes() {
    let objects = objects_of("ha");
    let front = find(&objects, "Deployment", "baton");
    assert_eq!(
        (front["spec"]["replicas"].as_u64(), text(front, "/spec/strategy/type")),
        (Some(3), "RollingUpdate")
    );
    // One of three is ever ready: neither an upgrade nor the drain of a machine may wait for two.
    assert_eq!(text(front, "/spec/strategy/rollingUpdate/maxUnavailable"), "100%");
    let mut budgets = objects.iter().filter(|one| text(one, "/kind") == "PodDisruptionBudget");
    assert!(budgets.all(|budget| !selects(budget.pointer("/spec/selector/matchLabels"), front)));
    // Each query is of the cluster: an average of it over the pods is none.
    for scaled in objects.iter().filter(|one| text(one, "/kind") == "ScaledObject") {
        assert_eq!(text(scaled, "/spec/triggers/0/metricType"), "Value", "{scaled}");
    }
    let (serves, args) = command(front, "baton", "baton-7");
    assert!(matches!(serves, Command::Serve(_)));
    for own in ["--name=baton-7", "--advertise=http://10.0.0.7:9090"] {
        assert!(args.contains(&own.to_owned()), "{args:?}");
    }
    let shared = |args: &[String]| {
        let of = |option: &str| args.iter().find(|arg| arg.starts_with(option)).cloned().expect("the option");
        (of("--etcd="), of("--cluster="), of("--cluster-key="))
    };
    let config =
        crate::config::load(&root().join("kubernetes-ha/baton.toml")).unwrap_or_else(|e| panic!("{e}"));
    for role in ["prefill", "decode"] {
        let set = find(&objects, "StatefulSet", &format!("baton-{role}"));
        let (node, told) = command(set, "node", &format!("{}0", &role[..1]));
        assert_eq!(shared(&told), shared(&args), "{role}");
        assert_eq!(node_blocks(&node), Some(config.scheduler.block_tokens));
        let engine = arguments(set, "sglang");
        assert!(engine.contains(&format!("--page-size={}", config.scheduler.block_tokens)), "{engine:?}");
        assert_eq!(
            port_of(&told, "--url="),
            engine.iter().find_map(|arg| arg.strip_prefix("--port=")?.parse().ok())
        );
        let room = |args: &[String], option: &str| {
            args.iter().find_map(|arg| arg.strip_prefix(option).map(str::to_owned))
        };
        let own = room(&engine, "--disaggregation-bootstrap-port=");
        assert_eq!((own.is_some(), room(&told, "--bootstrap-port=")), (role == "prefill", own));
    }
}

#[test]
fn nodes_beside_their_engines_say_the_same_as_these_and_as_the_configuration() {
    let objects = objects_of("pairs");
    let config = config_of(find(&objects, "ConfigMap", "baton-config"));
    for role in ["prefill", "decode"] {
        let set = find(&objects, "StatefulSet", &format!("baton-{role}"));
        assert_eq!(set["spec"]["template"]["spec"]["enableServiceLinks"], false, "vLLM reads VLLM_PORT");
        let engine = arguments(set, "vllm");
        let (runs, node) = command(set, "node", &format!("{}0", &role[..1]));
        assert_eq!(node_blocks(&runs), Some(config.scheduler.block_tokens));
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
