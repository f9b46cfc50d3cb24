package main

import (
	"fmt"
	"os"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

// renderKubeconfig returns a self-contained kubeconfig for one user, with one context.
func renderKubeconfig(server string, caCert []byte, u user) ([]byte, error) {
	const cluster = "devcluster"
	cfg := api.NewConfig()
	cfg.Clusters[cluster] = &api.Cluster{Server: server, CertificateAuthorityData: caCert}
	cfg.AuthInfos[u.name] = &api.AuthInfo{Token: u.token}
	cfg.Contexts[cluster] = &api.Context{Cluster: cluster, AuthInfo: u.name}
	cfg.CurrentContext = cluster
	return clientcmd.Write(*cfg)
}

func writeKubeconfig(path, server string, caCert []byte, u user) error {
	content, err := renderKubeconfig(server, caCert, u)
	if err != nil {
		return fmt.Errorf("render kubeconfig of %s: %w", u.name, err)
	}
	return os.WriteFile(path, content, 0o600)
}
