package scorer

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"
)

const (
	serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"
	maxPods        = 64 << 20 // bytes of the list
	listTimeout    = 10 * time.Second
	listEvery      = 15 * time.Second
)

// nodeTable knows the nodes of the pods in one namespace. It lists them in the background; a lookup never waits.
type nodeTable struct {
	byPod atomic.Pointer[map[string]string]
}

func (t *nodeTable) nodeOf(pod string) string {
	if table := t.byPod.Load(); table != nil {
		return (*table)[pod]
	}
	return ""
}

// keep lists the pods until the context ends. A failed list keeps the previous one.
func (t *nodeTable) keep(ctx context.Context, list func(context.Context) (map[string]string, error), every time.Duration) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		if table, err := list(ctx); err == nil {
			t.byPod.Store(&table)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

type podList struct {
	Items []struct {
		Metadata struct {
			Name string `json:"name"`
		} `json:"metadata"`
		Spec struct {
			NodeName string `json:"nodeName"`
		} `json:"spec"`
	} `json:"items"`
}

// inCluster lists the pods of a namespace by the API server, with the pod's own service account.
func inCluster(namespace string) (func(context.Context) (map[string]string, error), error) {
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, errors.New("the endpoint picker does not run in a cluster: nodes of pods are unknown")
	}
	authorities, err := os.ReadFile(filepath.Join(serviceAccount, "ca.crt"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authorities)
	client := &http.Client{
		Timeout:   listTimeout,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}},
	}
	address := "https://" + net.JoinHostPort(host, port) + "/api/v1/namespaces/" + url.PathEscape(namespace) + "/pods"
	return func(ctx context.Context) (map[string]string, error) {
		return listPods(ctx, client, address, filepath.Join(serviceAccount, "token"))
	}, nil
}

func listPods(ctx context.Context, client *http.Client, address, tokenFile string) (map[string]string, error) {
	token, err := readToken(tokenFile)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	answer, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the API server answers with status %d", answer.StatusCode)
	}
	var pods podList
	if err := json.NewDecoder(io.LimitReader(answer.Body, maxPods)).Decode(&pods); err != nil {
		return nil, err
	}
	table := make(map[string]string, len(pods.Items))
	for _, pod := range pods.Items {
		if pod.Spec.NodeName != "" {
			table[pod.Metadata.Name] = pod.Spec.NodeName
		}
	}
	return table, nil
}
