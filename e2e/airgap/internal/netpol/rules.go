// Package netpol enforces NetworkPolicies on one node: ingress and egress of the node's own pods, IPv4, by
// iptables. What the rules are follows from the API's objects alone (rules.go); enforce.go watches those and
// writes the rules.
//
// The meaning of a policy is that of networking.k8s.io/v1: a pod that no policy selects for a direction may do
// everything in it; one that is selected may do what some rule allows. Answers are always let through, and so
// is what a pod and its own node exchange: that never passes the FORWARD chain.
package netpol

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

const (
	// topChain is where a forwarded packet comes first.
	topChain = "PODNET-POLICY"
	// chainPrefix is of all our chains; the kernel allows names of 28 characters.
	chainPrefix = "PODNET-"
	ingress     = networkingv1.PolicyTypeIngress
	egress      = networkingv1.PolicyTypeEgress
)

// State is everything that the rules follow from.
type State struct {
	Policies   []*networkingv1.NetworkPolicy
	Pods       []*corev1.Pod
	Namespaces []*corev1.Namespace
}

// Chain is one chain of iptables. In the chain of a pod RETURN lets a packet through, its last rule drops it.
type Chain struct {
	Name  string
	Rules []string
}

// Chains are the rules of the node with this address, the same for the same state in whatever order.
func Chains(state State, hostIP string) []Chain {
	w := newWorld(state)
	top := Chain{Name: topChain, Rules: []string{"-m conntrack --ctstate RELATED,ESTABLISHED -j RETURN"}}
	var out []Chain
	for _, own := range w.pods {
		if own.pod.Status.HostIP != hostIP {
			continue
		}
		if c, selected := w.chain(own, egress, chainPrefix+"E-"+own.ip.String()); selected {
			out = append(out, c)
			top.Rules = append(top.Rules, fmt.Sprintf("-s %s/32 ! -d %s/32 -j %s", own.ip, own.ip, c.Name))
		}
		if c, selected := w.chain(own, ingress, chainPrefix+"I-"+own.ip.String()); selected {
			out = append(out, c)
			top.Rules = append(top.Rules, fmt.Sprintf("-d %s/32 ! -s %s/32 -j %s", own.ip, own.ip, c.Name))
		}
	}
	return append([]Chain{top}, out...)
}

// pod is one with an address of its own.
type pod struct {
	pod *corev1.Pod
	ip  netip.Addr
}

type world struct {
	policies   []*networkingv1.NetworkPolicy
	pods       []pod // by address
	namespaces map[string]labels.Set
}

func newWorld(state State) *world {
	w := &world{namespaces: map[string]labels.Set{}}
	for _, ns := range state.Namespaces {
		w.namespaces[ns.Name] = ns.Labels
	}
	w.policies = slices.Clone(state.Policies)
	slices.SortFunc(w.policies, func(a, b *networkingv1.NetworkPolicy) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	holder := map[netip.Addr]*corev1.Pod{}
	for _, p := range state.Pods {
		ip, has := address(p)
		if !has {
			continue
		}
		if other := holder[ip]; other == nil || other.CreationTimestamp.Before(&p.CreationTimestamp) {
			holder[ip] = p // of two, the one that is on its way out is the older
		}
	}
	for ip, p := range holder {
		w.pods = append(w.pods, pod{pod: p, ip: ip})
	}
	slices.SortFunc(w.pods, func(a, b pod) int { return a.ip.Compare(b.ip) })
	return w
}

// address is the pod's own IPv4 address; those with the node's network and those that ended have none.
func address(p *corev1.Pod) (netip.Addr, bool) {
	if p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return netip.Addr{}, false
	}
	for _, told := range p.Status.PodIPs {
		if ip, err := netip.ParseAddr(told.IP); err == nil && ip.Is4() {
			return ip, true
		}
	}
	return netip.Addr{}, false
}

// chain holds what may pass to or from a pod; false if no policy selects the pod for that direction.
func (w *world) chain(own pod, direction networkingv1.PolicyType, name string) (Chain, bool) {
	selected := false
	var rules []string
	for _, policy := range w.policies {
		if policy.Namespace != own.pod.Namespace || !concerns(policy, direction) ||
			!matches(&policy.Spec.PodSelector, own.pod.Labels) {
			continue
		}
		selected = true
		if direction == ingress {
			for _, rule := range policy.Spec.Ingress {
				rules = append(rules, w.rule(own, policy.Namespace, direction, rule.From, rule.Ports)...)
			}
		} else {
			for _, rule := range policy.Spec.Egress {
				rules = append(rules, w.rule(own, policy.Namespace, direction, rule.To, rule.Ports)...)
			}
		}
	}
	slices.Sort(rules)
	return Chain{Name: name, Rules: append(slices.Compact(rules), "-j DROP")}, selected
}

func concerns(policy *networkingv1.NetworkPolicy, direction networkingv1.PolicyType) bool {
	if len(policy.Spec.PolicyTypes) > 0 {
		return slices.Contains(policy.Spec.PolicyTypes, direction)
	}
	return direction == ingress || len(policy.Spec.Egress) > 0
}

// rule is one rule of a policy: every peer with every port.
func (w *world) rule(
	own pod,
	namespace string,
	direction networkingv1.PolicyType,
	peers []networkingv1.NetworkPolicyPeer,
	ports []networkingv1.NetworkPolicyPort,
) []string {
	flag := "-s"
	if direction == egress {
		flag = "-d"
	}
	others := w.others(namespace, peers)
	var out []string
	for _, port := range ports {
		protocol := cmp.Or(deref(port.Protocol), corev1.ProtocolTCP)
		if protocol != corev1.ProtocolTCP && protocol != corev1.ProtocolUDP {
			continue // a kernel need not know SCTP's ports: not supported, so not allowed
		}
		if port.Port == nil {
			for _, other := range others {
				out = append(out, other.match(flag)+fmt.Sprintf("-p %s -j RETURN", lower(protocol)))
			}
			continue
		}
		if port.Port.StrVal == "" {
			numbers := fmt.Sprint(port.Port.IntVal)
			if port.EndPort != nil {
				numbers = fmt.Sprintf("%d:%d", port.Port.IntVal, *port.EndPort)
			}
			for _, other := range others {
				out = append(out, other.to(flag, protocol, numbers))
			}
			continue
		}
		// a name means what the pod that is connected to says it means
		if direction == ingress {
			for _, number := range named(own.pod, port.Port.StrVal, protocol) {
				for _, other := range others {
					out = append(out, other.to(flag, protocol, number))
				}
			}
			continue
		}
		for _, other := range w.withPods(others) {
			for _, number := range named(other.pod, port.Port.StrVal, protocol) {
				out = append(out, other.to(flag, protocol, number))
			}
		}
	}
	if len(ports) == 0 {
		for _, other := range others {
			out = append(out, other.match(flag)+"-j RETURN")
		}
	}
	return out
}

// other is an end of a connection: a pod, a block of addresses, or anybody (no valid prefix).
type other struct {
	prefix netip.Prefix
	pod    *corev1.Pod
}

func (o other) match(flag string) string {
	if !o.prefix.IsValid() {
		return ""
	}
	return fmt.Sprintf("%s %s ", flag, o.prefix)
}

func (o other) to(flag string, protocol corev1.Protocol, numbers string) string {
	return o.match(flag) + fmt.Sprintf("-p %s --dport %s -j RETURN", lower(protocol), numbers)
}

func (w *world) others(namespace string, peers []networkingv1.NetworkPolicyPeer) []other {
	if len(peers) == 0 {
		return []other{{}}
	}
	var out []other
	for _, peer := range peers {
		if peer.IPBlock != nil {
			out = append(out, addresses(peer.IPBlock)...)
			continue
		}
		for _, p := range w.pods {
			if w.isPeer(p.pod, namespace, peer) {
				out = append(out, other{netip.PrefixFrom(p.ip, 32), p.pod})
			}
		}
	}
	return out
}

// withPods is the same with a pod in each: anybody becomes every pod, blocks of addresses have no names of ports.
func (w *world) withPods(others []other) []other {
	var out []other
	for _, o := range others {
		if o.pod != nil {
			out = append(out, o)
		} else if !o.prefix.IsValid() {
			for _, p := range w.pods {
				out = append(out, other{netip.PrefixFrom(p.ip, 32), p.pod})
			}
		}
	}
	return out
}

func (w *world) isPeer(p *corev1.Pod, namespace string, peer networkingv1.NetworkPolicyPeer) bool {
	if peer.NamespaceSelector == nil {
		if p.Namespace != namespace {
			return false
		}
	} else if found, known := w.namespaces[p.Namespace]; !known || !matches(peer.NamespaceSelector, found) {
		return false
	}
	if peer.PodSelector == nil {
		return peer.NamespaceSelector != nil
	}
	return matches(peer.PodSelector, p.Labels)
}

// matches is false for a selector that cannot be read: what is not understood is not allowed.
func matches(selector *metav1.LabelSelector, found map[string]string) bool {
	s, err := metav1.LabelSelectorAsSelector(selector)
	return err == nil && s.Matches(labels.Set(found))
}

func named(p *corev1.Pod, name string, protocol corev1.Protocol) []string {
	var out []string
	for _, c := range append(slices.Clone(p.Spec.InitContainers), p.Spec.Containers...) {
		for _, port := range c.Ports {
			if port.Name == name && cmp.Or(port.Protocol, corev1.ProtocolTCP) == protocol {
				out = append(out, fmt.Sprint(port.ContainerPort))
			}
		}
	}
	return out
}

// addresses of a block without its exceptions; none if any of them cannot be read or is IPv6.
func addresses(block *networkingv1.IPBlock) []other {
	cidr, err := netip.ParsePrefix(block.CIDR)
	if err != nil || !cidr.Addr().Is4() {
		return nil
	}
	var except []netip.Prefix
	for _, told := range block.Except {
		e, err := netip.ParsePrefix(told)
		if err != nil || !e.Addr().Is4() {
			return nil
		}
		except = append(except, e.Masked())
	}
	var out []other
	for _, p := range without(cidr.Masked(), except) {
		out = append(out, other{prefix: p})
	}
	return out
}

// without cuts a block in halves until each piece lies in no exception.
func without(block netip.Prefix, except []netip.Prefix) []netip.Prefix {
	for _, e := range except {
		if !e.Overlaps(block) {
			continue
		}
		if e.Bits() <= block.Bits() {
			return nil
		}
		bits := block.Bits() + 1
		high := block.Addr().As4()
		high[(bits-1)/8] |= 0x80 >> ((bits - 1) % 8)
		return append(without(netip.PrefixFrom(block.Addr(), bits), except),
			without(netip.PrefixFrom(netip.AddrFrom4(high), bits), except)...)
	}
	return []netip.Prefix{block}
}

// Script is what iptables-restore --noflush takes to replace the chains in one step; stale ones go.
func Script(table string, chains []Chain, stale []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "*%s\n", table)
	for _, c := range chains {
		fmt.Fprintf(&b, ":%s - [0:0]\n", c.Name)
	}
	for _, name := range stale {
		fmt.Fprintf(&b, ":%s - [0:0]\n", name)
	}
	for _, c := range chains {
		for _, rule := range c.Rules {
			fmt.Fprintf(&b, "-A %s %s\n", c.Name, rule)
		}
	}
	for _, name := range stale {
		fmt.Fprintf(&b, "-X %s\n", name)
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

func lower(protocol corev1.Protocol) string { return strings.ToLower(string(protocol)) }

func deref[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}
