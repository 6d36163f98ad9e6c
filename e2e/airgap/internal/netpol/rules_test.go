package netpol

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const (
	node     = "172.18.0.2"
	shop     = "10.244.1.10" // team=a, ports http 8080/TCP and dns 53/UDP
	till     = "10.244.1.11" // team=a
	foreign  = "10.244.2.20" // app=till in the namespace of team b, on another node
	outside  = "192.0.2.7"
	otherNet = "10.9.0.1"
)

func pods() []*corev1.Pod {
	made := func(ns, name, ip, host string, ports ...corev1.ContainerPort) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{"app": name}},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Ports: ports}}},
			Status:     corev1.PodStatus{HostIP: host, Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: ip}}},
		}
	}
	return []*corev1.Pod{
		made("a", "shop", shop, node, corev1.ContainerPort{Name: "http", ContainerPort: 8080},
			corev1.ContainerPort{Name: "dns", ContainerPort: 53, Protocol: corev1.ProtocolUDP}),
		made("a", "till", till, node),
		made("b", "till", foreign, "172.18.0.3", corev1.ContainerPort{Name: "http", ContainerPort: 9090}),
	}
}

func namespaces() []*corev1.Namespace {
	var out []*corev1.Namespace
	for _, name := range []string{"a", "b"} {
		labels := map[string]string{"team": name}
		out = append(out, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}})
	}
	return out
}

func policy(t *testing.T, spec string) *networkingv1.NetworkPolicy {
	t.Helper()
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: fmt.Sprint(len(spec))}}
	if err := yaml.UnmarshalStrict([]byte(spec), &p.Spec); err != nil {
		t.Fatalf("%v in %s", err, spec)
	}
	return p
}

type packet struct {
	from, to string
	protocol string
	port     int
}

// passes walks the rules as the kernel would, for a packet that opens a connection.
func passes(t *testing.T, chains []Chain, p packet) bool {
	t.Helper()
	for _, rule := range chains[0].Rules {
		target, matched := match(t, rule, p)
		if !matched || target == "RETURN" {
			continue
		}
		i := slices.IndexFunc(chains, func(c Chain) bool { return c.Name == target })
		if i < 0 {
			t.Fatalf("no chain %s", target)
		}
		for _, inner := range chains[i].Rules {
			if target, matched := match(t, inner, p); matched {
				if target == "DROP" {
					return false
				}
				break
			}
		}
	}
	return true
}

func match(t *testing.T, rule string, p packet) (target string, matched bool) {
	t.Helper()
	if strings.Contains(rule, "ESTABLISHED") {
		return "", false
	}
	matched = true
	words, not := strings.Fields(rule), false
	for i := 0; i < len(words); i += 2 {
		if words[i] == "!" {
			not = true
			i++
		}
		holds, value := false, words[i+1]
		switch words[i] {
		case "-s":
			holds = netip.MustParsePrefix(value).Contains(netip.MustParseAddr(p.from))
		case "-d":
			holds = netip.MustParsePrefix(value).Contains(netip.MustParseAddr(p.to))
		case "-p":
			holds = value == p.protocol
		case "--dport":
			low, high, isRange := strings.Cut(value, ":")
			first, _ := strconv.Atoi(low)
			last := first
			if isRange {
				last, _ = strconv.Atoi(high)
			}
			holds = first <= p.port && p.port <= last
		case "-j":
			target, holds = value, true
		default:
			t.Fatalf("not understood: %s", rule)
		}
		matched = matched && holds != not
		not = false
	}
	return target, matched
}

func TestAPacketPassesIfThePoliciesAllowIt(t *testing.T) {
	toShop := func(from string, port int) packet { return packet{from, shop, "tcp", port} }
	fromShop := func(to string, port int) packet { return packet{shop, to, "tcp", port} }
	type allowed map[packet]bool
	for name, c := range map[string]struct {
		policies []string
		want     allowed
	}{
		"no policy: everything": {nil, allowed{toShop(till, 1): true, toShop(outside, 1): true, fromShop(foreign, 2): true}},
		"deny all that comes in": {
			[]string{`{podSelector: {}}`},
			allowed{
				toShop(till, 8080): false, toShop(foreign, 8080): false, toShop(outside, 8080): false,
				{shop, till, "tcp", 1}: false, fromShop(foreign, 1): true, fromShop(outside, 1): true,
				{shop, shop, "tcp", 8080}: true, // nobody is kept from himself
			},
		},
		"deny all that goes out": {
			[]string{`{podSelector: {matchLabels: {app: shop}}, policyTypes: [Egress]}`},
			allowed{
				fromShop(till, 1): false, fromShop(outside, 443): false, {shop, shop, "tcp", 1}: true,
				toShop(foreign, 1): true, {till, outside, "tcp", 443}: true,
			},
		},
		"types that are not told follow from the rules": {
			[]string{`{podSelector: {matchLabels: {app: shop}}, egress: [{to: [{podSelector: {}}]}]}`},
			allowed{fromShop(till, 1): true, fromShop(foreign, 1): false, toShop(till, 1): false},
		},
		"an empty rule allows everything": {
			[]string{`{podSelector: {}, ingress: [{}]}`},
			allowed{toShop(outside, 1): true, {foreign, shop, "udp", 9}: true, {foreign, shop, "icmp", 0}: true},
		},
		"pods of the same namespace": {
			[]string{`{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {app: till}}}]}]}`},
			allowed{toShop(till, 1): true, toShop(foreign, 1): false},
		},
		"pods of namespaces": {
			[]string{`{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: b}}}]}]}`},
			allowed{toShop(till, 1): false, toShop(foreign, 1): true},
		},
		"pods with a label in namespaces with a label": {
			[]string{`{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: b}},
				podSelector: {matchLabels: {app: shop}}}]}]}`},
			allowed{toShop(till, 1): false, toShop(foreign, 1): false},
		},
		"one or the other": {
			[]string{`{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: b}}},
				{podSelector: {matchLabels: {app: till}}}]}]}`},
			allowed{toShop(till, 1): true, toShop(foreign, 1): true, toShop(outside, 1): false},
		},
		"expressions": {
			[]string{`{podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [till]}]}}`},
			allowed{toShop(till, 1): false, {shop, till, "tcp", 1}: true},
		},
		"policies add up": {
			[]string{
				`{podSelector: {}, ingress: [{ports: [{port: 1}]}]}`,
				`{podSelector: {matchLabels: {app: shop}}, ingress: [{ports: [{port: 22}]}]}`,
			},
			allowed{toShop(outside, 1): true, toShop(outside, 22): true, toShop(outside, 3): false, {shop, till, "tcp", 22}: false},
		},
		"both ends must allow": {
			[]string{
				`{podSelector: {matchLabels: {app: shop}}, policyTypes: [Egress], egress: [{ports: [{port: 7}]}]}`,
				`{podSelector: {matchLabels: {app: till}}, ingress: [{ports: [{port: 8}]}]}`,
			},
			allowed{fromShop(till, 7): false, fromShop(till, 8): false, fromShop(foreign, 7): true, {foreign, till, "tcp", 8}: true},
		},
		"ports, ranges, protocols": {
			[]string{`{podSelector: {}, ingress: [{ports: [{port: 80}, {port: 1000, endPort: 1002}, {port: 53, protocol: UDP},
				{port: 99, protocol: SCTP}]}]}`},
			allowed{
				toShop(till, 80): true, {till, shop, "udp", 80}: false, toShop(till, 999): false, toShop(till, 1000): true,
				toShop(till, 1002): true, toShop(till, 1003): false, {till, shop, "udp", 53}: true, {till, shop, "sctp", 99}: false,
			},
		},
		"a protocol without a port": {
			[]string{`{podSelector: {}, ingress: [{ports: [{protocol: UDP}]}]}`},
			allowed{{till, shop, "udp", 80}: true, toShop(till, 80): false},
		},
		"a named port of the pod itself": {
			[]string{`{podSelector: {}, ingress: [{ports: [{port: http}, {port: dns, protocol: UDP}]}]}`},
			allowed{
				toShop(foreign, 8080): true, toShop(foreign, 9090): false, {foreign, shop, "udp", 53}: true,
				toShop(foreign, 53): false, {foreign, till, "tcp", 8080}: false,
			},
		},
		"a name of another protocol's port": {
			[]string{`{podSelector: {}, ingress: [{ports: [{port: dns}]}]}`},
			allowed{toShop(till, 53): false, {till, shop, "udp", 53}: false},
		},
		"a named port of whoever is connected to": {
			[]string{`{podSelector: {}, policyTypes: [Egress], egress: [{ports: [{port: http}]}]}`},
			allowed{
				fromShop(foreign, 9090): true, fromShop(foreign, 8080): false, {till, shop, "tcp", 8080}: true,
				fromShop(outside, 8080): false,
			},
		},
		"blocks of addresses": {
			[]string{`{podSelector: {}, policyTypes: [Ingress, Egress],
				ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.9.0.0/16, 10.244.1.11/32]}}], ports: [{port: 1}]}],
				egress: [{to: [{ipBlock: {cidr: 0.0.0.0/0, except: [192.0.2.0/24]}}]}]}`},
			allowed{
				toShop(foreign, 1): true, toShop(foreign, 2): false, toShop(otherNet, 1): false, toShop(outside, 1): false,
				fromShop(outside, 1): false, fromShop(foreign, 1): true, fromShop("192.0.3.0", 1): true,
				{till, shop, "tcp", 1}: false,
			},
		},
		"a block that is no IPv4": {
			[]string{`{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: "fd00::/8"}}]}]}`},
			allowed{toShop(foreign, 1): false},
		},
		"a policy of another namespace": {
			[]string{`{podSelector: {matchLabels: {app: nobody}}}`},
			allowed{toShop(foreign, 1): true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			state := State{Pods: pods(), Namespaces: namespaces()}
			for _, spec := range c.policies {
				state.Policies = append(state.Policies, policy(t, spec))
			}
			chains := Chains(state, node)
			for p, want := range c.want {
				if got := passes(t, chains, p); got != want {
					t.Errorf("%v: passes %v\n%s", p, got, Script("mangle", chains, nil))
				}
			}
		})
	}
}

func TestOnlyTheNodesOwnPodsAreGuarded(t *testing.T) {
	state := State{Pods: pods(), Namespaces: namespaces()}
	all := policy(t, `{podSelector: {}}`)
	all.Namespace = "b"
	state.Policies = append(state.Policies, all)
	if chains := Chains(state, node); len(chains) != 1 {
		t.Errorf("b's pod is on another node: %v", chains)
	}
	if chains := Chains(state, "172.18.0.3"); passes(t, chains, packet{shop, foreign, "tcp", 1}) {
		t.Error("on its own node it is guarded")
	}
}

func TestPodsWithoutAnAddressOfTheirOwnDoNotCount(t *testing.T) {
	state := State{Pods: pods(), Namespaces: namespaces(), Policies: []*networkingv1.NetworkPolicy{
		policy(t, `{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {app: till}}}]}]}`),
	}}
	if !passes(t, Chains(state, node), packet{till, shop, "tcp", 1}) {
		t.Fatal("the control: till is a peer")
	}
	state.Pods[1].Status.Phase = corev1.PodSucceeded
	if passes(t, Chains(state, node), packet{till, shop, "tcp", 1}) {
		t.Error("who has ended has left his address to others")
	}
	state.Pods[1].Status.Phase = corev1.PodRunning
	state.Pods[1].Spec.HostNetwork = true
	if passes(t, Chains(state, node), packet{till, shop, "tcp", 1}) {
		t.Error("a pod with the node's network is the node")
	}
}

func TestAnAddressBelongsToTheNewerPod(t *testing.T) {
	state := State{Pods: pods(), Namespaces: namespaces(), Policies: []*networkingv1.NetworkPolicy{
		policy(t, `{podSelector: {matchLabels: {app: till}}}`),
	}}
	state.Pods[1].Status.PodIPs[0].IP = shop
	state.Pods[0].CreationTimestamp = metav1.NewTime(time.Unix(100, 0))
	if !passes(t, Chains(state, node), packet{foreign, shop, "tcp", 1}) {
		t.Error("shop is newer and no policy selects it")
	}
	state.Pods[1].CreationTimestamp = metav1.NewTime(time.Unix(200, 0))
	if passes(t, Chains(state, node), packet{foreign, shop, "tcp", 1}) {
		t.Error("till is newer")
	}
}

func TestTheRulesDoNotDependOnTheOrderOfObjects(t *testing.T) {
	state := State{Pods: pods(), Namespaces: namespaces(), Policies: []*networkingv1.NetworkPolicy{
		policy(t, `{podSelector: {}, ingress: [{from: [{namespaceSelector: {}}], ports: [{port: http}, {port: 7}]}]}`),
		policy(t, `{podSelector: {matchLabels: {app: shop}}, policyTypes: [Egress]}`),
	}}
	want := Script("mangle", Chains(state, node), nil)
	for range 20 {
		rand.Shuffle(len(state.Pods), func(i, j int) { state.Pods[i], state.Pods[j] = state.Pods[j], state.Pods[i] })
		slices.Reverse(state.Policies)
		if got := Script("mangle", Chains(state, node), nil); got != want {
			t.Fatalf("%s\nand\n%s", got, want)
		}
	}
}

func TestTheScriptReplacesChainsAndRemovesStaleOnes(t *testing.T) {
	state := State{Pods: pods(), Namespaces: namespaces(), Policies: []*networkingv1.NetworkPolicy{
		policy(t, `{podSelector: {matchLabels: {app: shop}}, ingress: [{ports: [{port: 7, endPort: 9}]}]}`),
	}}
	want := `*mangle
:PODNET-POLICY - [0:0]
:PODNET-I-10.244.1.10 - [0:0]
:PODNET-E-10.244.1.99 - [0:0]
-A PODNET-POLICY -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN
-A PODNET-POLICY -d 10.244.1.10/32 ! -s 10.244.1.10/32 -j PODNET-I-10.244.1.10
-A PODNET-I-10.244.1.10 -p tcp --dport 7:9 -j RETURN
-A PODNET-I-10.244.1.10 -j DROP
-X PODNET-E-10.244.1.99
COMMIT
`
	if got := Script("mangle", Chains(state, node), []string{"PODNET-E-10.244.1.99"}); got != want {
		t.Error(got)
	}
}

func TestABlockWithoutItsExceptionsIsWhatIsLeft(t *testing.T) {
	block := netip.MustParsePrefix("10.0.0.0/28")
	for range 200 {
		var except []netip.Prefix
		for range rand.IntN(4) {
			bits := 26 + rand.IntN(7)
			at := netip.AddrFrom4([4]byte{10, 0, 0, byte(rand.IntN(40))})
			except = append(except, netip.PrefixFrom(at, bits).Masked())
		}
		left := without(block, except)
		for i := range 64 {
			at := netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
			in := func(p netip.Prefix) bool { return p.Contains(at) }
			want := block.Contains(at) && !slices.ContainsFunc(except, in)
			if got := slices.ContainsFunc(left, in); got != want {
				t.Fatalf("%s without %v: %v is in it: %v", block, except, at, got)
			}
		}
	}
}
